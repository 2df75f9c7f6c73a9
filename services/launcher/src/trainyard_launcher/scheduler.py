"""Calls to the scheduler: those that wait go together, and are repeated while it is away."""

from __future__ import annotations

import asyncio
import random
from collections import deque
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


class Sized(Protocol):
    """A message."""

    def ByteSize(self) -> int: ...


Q = TypeVar("Q", bound=Sized)
A = TypeVar("A")
A_co = TypeVar("A_co", covariant=True)


class Result(Protocol[A_co]):
    """What a batch answers to one of its calls."""

    @property
    def code(self) -> int: ...
    @property
    def message(self) -> str: ...
    @property
    def answer(self) -> A_co: ...


_MOST_CALLS = 200
_MOST_BYTES = 4 * 1024 * 1024
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class Batches(Generic[Q, A]):
    """Calls of one kind: a lone one leaves at once; those that come while one is on its way leave together after it.

    A thousand attempts that start or end at the same time are a few calls, and none of them can be a flood.

    Args:
        send: makes one call of many; its results are in their order.
    """

    def __init__(self, send: Callable[[Sequence[Q]], Awaitable[Sequence[Result[A]]]]) -> None:
        self._send = send
        self._waiting: deque[tuple[Q, asyncio.Future[A]]] = deque()
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
            batch = self._take()
            try:
                results = await self._send([request for request, _ in batch])
                for (_, done), result in zip(batch, results, strict=True):
                    _settle(done, result)
            except asyncio.CancelledError:
                for _, done in batch:
                    done.cancel()
                raise
            except Exception as error:
                for _, done in batch:
                    if not done.done():
                        done.set_exception(error)

    def _take(self) -> list[tuple[Q, asyncio.Future[A]]]:
        batch = [self._waiting.popleft()]
        size = batch[0][0].ByteSize()
        while self._waiting and len(batch) < _MOST_CALLS:
            size += self._waiting[0][0].ByteSize()
            if size > _MOST_BYTES:
                break
            batch.append(self._waiting.popleft())
        return batch


def _settle(done: asyncio.Future[A], result: Result[A]) -> None:
    if done.done():  # whoever asked is gone
        return
    if result.code:
        empty = grpc.aio.Metadata()
        done.set_exception(grpc.aio.AioRpcError(_CODES[result.code], empty, empty, details=result.message))
    else:
        done.set_result(result.answer)
