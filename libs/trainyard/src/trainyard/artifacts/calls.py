"""Calls to the store that wait for a yard that is away for a moment."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import grpc
from trainyard_protos.v1 import common_pb2

T = TypeVar("T")

CALL_TIMEOUT_S = 60.0
MOVE_TIMEOUT_S = 300.0
"""For calls that carry content."""
CHUNK_MISSING = "ChunkMissing"

Progress = Callable[[int], None]
"""Told how many more bytes are done."""

_ERROR_KEY = "trainyard-error-bin"
_FIRST_PAUSE_S = 0.1
_LAST_PAUSE_S = 5.0
_PASSING = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED})
_BUSY = frozenset({"Busy", "TooManyCalls", "TooManyStreams"})


@dataclass(frozen=True, slots=True)
class Pace:
    """How much of this machine and of the store a transfer takes.

    Attributes:
        page_bytes: of one call that carries content.
        pages: held in memory at once.
        streams: calls that carry content at once. What is on its way without being acknowledged, `streams` pages, is
            all that an interrupted transfer moves again: one part.
        patience_s: for how many seconds a call that fails because the yard is away is made again.
    """

    page_bytes: int = 16 * 1024 * 1024
    pages: int = 4
    streams: int = 2
    patience_s: float = 60.0

    @property
    def part_bytes(self) -> int:
        """What an interrupted transfer moves again, at most."""
        return self.page_bytes * self.streams


FULL = Pace()
FRUGAL = Pace(page_bytes=4 * 1024 * 1024, pages=2, streams=1, patience_s=20.0)
"""For the agent beside training. At the peak of an upload it holds 19 MB more than before: the pages, messages on their
way, and the libraries' own code. Pages of half the size would save 5 MB and make the store sync twice as often.
"""


def ignore(done: int) -> None:
    """The progress of somebody who does not look."""


def reason(error: grpc.aio.AioRpcError) -> str:
    """The stable code of what the store refused; "" when the answer is not the store's own."""
    info = dict(error.trailing_metadata() or ()).get(_ERROR_KEY, b"")
    return common_pb2.ErrorInfo.FromString(info).reason if isinstance(info, bytes) else ""


async def patiently(call: Callable[[], Awaitable[T]], patience_s: float) -> T:
    """Makes a call, again and again while the yard is away or busy, for `patience_s` seconds from its first failure.

    Raises:
        grpc.aio.AioRpcError: the yard is still away, or gave a definite answer; CANCELLED: the channel was closed.
    """
    now = asyncio.get_running_loop().time
    give_up: float | None = None
    pause = _FIRST_PAUSE_S
    while True:
        try:
            return await call()
        except asyncio.CancelledError:
            if _is_being_cancelled():
                raise
            # gRPC's word for a call that ended on this side, as with its channel. Let through, it would end the task
            # that made the call as if somebody had wanted that, without an error.
            raise _ended_here() from None
        except grpc.aio.AioRpcError as error:
            give_up = now() + patience_s if give_up is None else give_up
            if not _is_passing(error) or now() + pause > give_up:
                raise
        await asyncio.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(pause * 2, _LAST_PAUSE_S)


def _is_passing(error: grpc.aio.AioRpcError) -> bool:
    if error.code() in _PASSING:
        return True
    return error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and reason(error) in _BUSY


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _ended_here() -> grpc.aio.AioRpcError:
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode.CANCELLED, nothing, nothing, "the connection was closed on this side")
