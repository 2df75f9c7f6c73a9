import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

import pytest
from trainyard import Client, errors
from trainyard_protos.v1 import metrics_pb2

from libs.trainyard.tests.client.scripted import JOB_ID, ScriptedYard, document, event, job, line, lines, started

T = TypeVar("T")


async def outside(work: Callable[[], T]) -> T:
    """Runs ordinary code on a thread, while the scripted yard serves on this one."""
    return await asyncio.to_thread(work)


async def test_a_job_is_submitted_followed_and_read(yard: ScriptedYard) -> None:
    yard.job = job("succeeded")
    yard.live = [[started(1), lines(line(0, "hello"))]]
    yard.stored = [metrics_pb2.StoredLine(attempt=1, line=line(0, "hello"))]
    yard.series = [
        metrics_pb2.SeriesInfo(name="accuracy", last_value=0.5, rank=1),
        metrics_pb2.SeriesInfo(name="accuracy", last_value=0.98, rank=0),
        metrics_pb2.SeriesInfo(name="system/cpu", last_value=1.0),
    ]

    def work() -> None:
        with Client() as client:
            handle = client.submit(document())
            assert (handle.id, handle.name) == (JOB_ID, "digits")
            assert [each.text for item in handle.follow() for each in item.lines.lines] == ["hello"]
            assert [each.line.text for each in handle.logs()] == ["hello"]
            assert handle.wait().id == JOB_ID
            assert handle.values() == {"accuracy": 0.98}
            assert list(handle.metrics("accuracy")["accuracy"].step) == [1, 2]

    await outside(work)


async def test_errors_reach_the_caller(yard: ScriptedYard) -> None:
    yard.job = job("failed", message="it broke")

    def work() -> None:
        with Client() as client, pytest.raises(errors.JobFailed, match="it broke"):
            client.job(JOB_ID).wait()

    await outside(work)


async def test_leaving_a_stream_early_ends_it(yard: ScriptedYard) -> None:
    never = asyncio.Event()
    yard.events = [[event(1, "Submitted", "queued"), never]]

    def work() -> None:
        with Client() as client:
            for each in client.watch(JOB_ID):
                assert each.seq == 1
                break

    await asyncio.wait_for(outside(work), 30)


async def test_no_yard_leaves_no_thread_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("TRAINYARD_HOME", f"{tmp_path}/none")
    before = set(threading.enumerate())
    with pytest.raises(errors.NotRunning):
        Client()
    assert "trainyard-client" not in [thread.name for thread in set(threading.enumerate()) - before]
