"""The view of a run, without a process around it."""

import asyncio
from typing import Any

import grpc
import pytest
from trainyard import errors
from trainyard.cli.run import watching
from trainyard.client import AsyncClient

from libs.trainyard.tests.client.scripted import Refusal, ScriptedYard, event, job, line, lines, started
from scripts.testbed.patience import PATIENCE_S


class _View:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self.told.append(name)


async def test_output_that_never_ends_does_not_keep_an_ended_job(
    yard: ScriptedYard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "_LAST_LINES_S", 0.01)
    yard.events = [[event(1, "Succeeded", "succeeded")]]
    yard.live = [[started(1), lines(line(0, "hello")), asyncio.Event()]]
    view = _View()
    async with AsyncClient() as client:
        await asyncio.wait_for(watching.show(client, job("running"), view), 30)
    assert "happened" in view.told


async def test_a_refused_stream_ends_the_run_with_its_error(yard: ScriptedYard) -> None:
    never = asyncio.Event()
    yard.events = [[event(1, "Running", "running"), never]]
    yard.live = [[started(1), Refusal(grpc.StatusCode.PERMISSION_DENIED, "not yours")]]
    async with AsyncClient() as client:
        with pytest.raises(errors.Refused, match="not yours"):
            await asyncio.wait_for(watching.show(client, job("running"), _View()), 30)


async def test_the_end_of_output_alone_does_not_end_the_run(yard: ScriptedYard) -> None:
    end = asyncio.Event()
    yard.job = job("succeeded")
    yard.events = [[event(1, "Running", "running"), end, event(2, "Succeeded", "succeeded")]]
    yard.live = [[started(1), lines(line(0, "hello"))]]
    async with AsyncClient() as client:
        showing = asyncio.create_task(watching.show(client, job("running"), view := _View()))
        async with asyncio.timeout(PATIENCE_S):
            while "wrote" not in view.told or not yard.asked("GetJob"):
                await asyncio.sleep(0)
        assert not showing.done()
        end.set()
        await asyncio.wait_for(showing, PATIENCE_S)


async def test_a_start_that_takes_long_is_explained(yard: ScriptedYard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "_SLOW_START_S", 0.001)
    explained = asyncio.Event()
    view = _View()
    view.starts_slowly = lambda summary: explained.set() if summary == "It waits." else None
    yard.events = [[event(1, "Admitted", "starting"), explained, event(2, "Succeeded", "succeeded")]]
    yard.job = job("succeeded")
    async with AsyncClient() as client:
        await asyncio.wait_for(watching.show(client, job("queued"), view), 30)


async def test_a_quick_start_is_not_explained(yard: ScriptedYard) -> None:
    yard.events = [[event(1, "Admitted", "starting"), event(2, "Running", "running"), event(3, "Failed", "failed")]]
    yard.job = job("failed")
    async with AsyncClient() as client:
        await asyncio.wait_for(watching.show(client, job("queued"), view := _View()), 30)
    assert "starts_slowly" not in view.told
