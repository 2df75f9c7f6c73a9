"""Calls to the scheduler: those that wait go together, and are repeated while it is away."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

import grpc

AWAY = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
    }
)
"""Statuses after which the same call may succeed."""


def is_away(error: grpc.aio.AioRpcError) -> bool:
    """Whether it is worth to call again."""
    return error.code() in AWAY


def backoff(first_s: float = 0.1, most_s: float = 5.0) -> Iterator[float]:
    """Pauses that double, with jitter, so that many who wait do not come back at once."""
    pause = first_s
    while True:
        yield pause * random.uniform(0.5, 1)
        pause = min(pause * 2, most_s)


Q = TypeVar("Q")
A_co = TypeVar("A_co", covariant=True)
A = TypeVar("A")


class Result(Protocol[A_co]):
    """What a batch answers to one of its calls."""

    @property
    def code(self) -> int: ...
    @property
    def message(self) -> str: ...
    @property
    def answer(self) -> A_co: ...


class Batches(Generic[Q, A]):
    """Calls of one kind: a lone one leaves at once; those that come while one is on its way leave together after it.

    A thousand attempts that start or end at the same time are a few calls, and none of them can be a flood.

    Args:
        send: makes one call of many; answers in their order.
        most: how many go together.
    """

    def __init__(self, send: Callable[[Sequence[Q]], Awaitable[Sequence[Result[A]]]], most: int = 200) -> None:
        self._send = send
        self._most = most
        self._waiting: list[tuple[Q, asyncio.Future[A]]] = []
        self._sending: asyncio.Task[None] | None = None

    async def call(self, request: Q) -> A:
        """One call.

        Raises:
            grpc.aio.AioRpcError: it failed; or all that went together did.
        """
        done: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, done))
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send_waiting(), name="batches")
        return await done

    async def _send_waiting(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[: self._most], self._waiting[self._most :]
            try:
                results = await self._send([request for request, _ in batch])
            except BaseException as error:
                for _, done in batch:
                    if not done.done():
                        done.set_exception(error)
                if not isinstance(error, grpc.RpcError):
                    raise
                continue
            for (_, done), result in zip(batch, results, strict=True):
                if not done.done():
                    _settle(done, result)


def _settle(done: asyncio.Future[A], result: Result[A]) -> None:
    if result.code:
        code = _CODES[result.code]
        done.set_exception(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=result.message))
    else:
        done.set_result(result.answer)


_CODES = {code.value[0]: code for code in grpc.StatusCode}
