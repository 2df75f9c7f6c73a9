"""Calls to the scheduler, repeated while it is away."""

from __future__ import annotations

import random
from collections.abc import Iterator

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
