"""Work on many things, some at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


async def each(items: Iterable[T], work: Callable[[T], Awaitable[None]], *, limit: int) -> None:
    """Awaits `work(item)` for every item, at most `limit` at a time. The first error ends the others and is raised."""
    remaining = iter(items)

    async def worker() -> None:
        for item in remaining:
            await work(item)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(limit):
                group.create_task(worker())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
