"""A yard that was lost is waited for, not in silence, and not in vain."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from types import SimpleNamespace

import grpc
import pytest
from trainyard import errors
from trainyard.client import AsyncClient
from trainyard.client import connection as connections
from trainyard.client.connection import Connection, Outage, Target

from libs.trainyard.tests.client.scripted import Refusal, ScriptedYard, event, job
from scripts.testbed.ports import free_port

AWAY = Refusal(grpc.StatusCode.UNAVAILABLE, "the yard's scheduler service is not reachable")
"""What a proxy answers for a service that is being started again."""


async def test_waiting_is_told_and_ends_when_the_cluster_has_no_such_yard_any_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    connection = Connection(Target(f"127.0.0.1:{free_port()}", "token"))
    connection._forward = SimpleNamespace(trouble=errors.NotFound("no release yard"), close=lambda: None)  # type: ignore[assignment]
    with pytest.raises(errors.NotFound, match="no release yard"):
        await connection.until_back(errors.NotRunning("the gateway went away"), Outage())
    assert "the gateway went away" in caplog.text
    assert "waiting for up to 300 s" in caplog.text
    await connection.close()


async def test_an_address_where_nothing_answers_is_told_after_the_deadline_for_connecting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert connections.CONNECT_S <= 2
    monkeypatch.setattr(connections, "CONNECT_S", 0.05)
    with ExitStack() as open_sockets:
        server = open_sockets.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        address = server.getsockname()
        for _ in range(3):  # who takes no connection lets the kernel drop further ones, as a machine that is off does
            waiting = open_sockets.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(address)
        connection = Connection(Target(f"127.0.0.1:{address[1]}", "token"))
        with pytest.raises(errors.NotRunning, match=r"nothing answers at 127.0.0.1:.* within 0\.05 s") as caught:
            await connection.call(connection.yard.Info, None)
        assert "yard context list" in caught.value.hint
        await connection.close()


async def test_a_job_that_is_known_is_waited_for_while_its_scheduler_is_away(
    yard: ScriptedYard, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connections, "_PAUSE_S", 0.0)
    yard.events = [[event(2, "Succeeded", "succeeded")]]
    yard.job = job("succeeded")
    yard.refusals = {"Watch": [AWAY, AWAY, AWAY], "GetJob": [AWAY, AWAY]}
    async with AsyncClient() as client:
        ended = await client.until_ended(job("running"))
    assert ended.state == yard.job.state
    assert caplog.text.count("waiting for up to 30 s") == 2, "one warning for each of the two outages"


async def test_a_service_that_stays_away_behind_a_proxy_that_answers_is_not_waited_for_without_end(
    yard: ScriptedYard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "PATIENCE_S", 0.0)
    yard.refusals = {"Watch": [AWAY] * 100}
    async with AsyncClient() as client:
        with pytest.raises(errors.NotRunning, match="scheduler service is not reachable"):
            [each async for each in client.watch(from_now=True)]
