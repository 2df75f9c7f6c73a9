"""Calls to the scheduler that go together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc
import pytest
from trainyard_launcher.scheduler import Batches
from trainyard_protos.v1 import scheduler_pb2

Request = scheduler_pb2.ClaimAttemptRequest
Answer = scheduler_pb2.ClaimAttemptResponse
Result = scheduler_pb2.ClaimAttemptsResponse.Result


class Calls:
    """Keeps each call of many until it is let go; answers with each request's id."""

    def __init__(self) -> None:
        self.made: list[list[str]] = []
        self.open = asyncio.Event()
        self.error: Exception | None = None

    async def send(self, requests: Sequence[Request]) -> list[Result]:
        self.made.append([request.attempt_id for request in requests])
        await self.open.wait()
        if self.error is not None:
            raise self.error
        return [self._answer(request.attempt_id) for request in requests]

    def _answer(self, name: str) -> Result:
        if name == "wrong":
            return Result(code=grpc.StatusCode.NOT_FOUND.value[0], message="no such attempt")
        return Result(answer=Answer(stale_reason=name))


async def let_all_run() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def begin(batches: Batches[Request, Answer], *names: str) -> list[asyncio.Task[Answer]]:
    return [asyncio.create_task(batches.call(Request(attempt_id=name))) for name in names]


async def test_a_lone_call_leaves_at_once_and_those_after_it_leave_together() -> None:
    calls = Calls()
    batches = Batches(calls.send)
    first = begin(batches, "first")
    await let_all_run()
    others = begin(batches, "second", "third")
    await let_all_run()
    assert calls.made == [["first"]]
    calls.open.set()
    answers = await asyncio.gather(*first, *others)
    assert [answer.stale_reason for answer in answers] == ["first", "second", "third"]
    assert calls.made == [["first"], ["second", "third"]]


async def test_one_that_is_refused_leaves_the_others_alone() -> None:
    calls = Calls()
    calls.open.set()
    good, wrong = begin(Batches(calls.send), "good", "wrong")
    assert (await good).stale_reason == "good"
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await wrong
    assert (refused.value.code(), refused.value.details()) == (grpc.StatusCode.NOT_FOUND, "no such attempt")


async def test_a_call_that_fails_fails_for_all_in_it_and_the_next_one_goes_on() -> None:
    calls = Calls()
    calls.open.set()
    calls.error = RuntimeError("away")
    batches = Batches(calls.send)
    outcomes = await asyncio.gather(*begin(batches, "one", "two"), return_exceptions=True)
    assert outcomes == [calls.error, calls.error]
    calls.error = None
    assert (await batches.call(Request(attempt_id="three"))).stale_reason == "three"


async def test_a_caller_that_gives_up_does_not_take_the_others_with_it() -> None:
    calls = Calls()
    leaving, staying = begin(Batches(calls.send), "leaving", "staying")
    await let_all_run()
    leaving.cancel()
    calls.open.set()
    assert (await staying).stale_reason == "staying"


async def test_no_call_is_larger_than_a_message_may_be() -> None:
    calls = Calls()
    calls.open.set()
    large = "x" * 1_500_000
    await asyncio.gather(*begin(Batches(calls.send), large, large, large, *(["small"] * 250)))
    assert [len(made) for made in calls.made] == [2, 200, 51]
