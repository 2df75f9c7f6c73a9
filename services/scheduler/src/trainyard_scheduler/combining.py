"""Calls that would wait for the writer anyway share one transaction.

Launchers claim and report by the thousand, each a small change. Those that arrive while a write is on its way go
together in the next one: their rows are read at once and written at once. A lone call waits for nobody.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from trainyard_scheduler.ledger import Ledger, Transaction

T = TypeVar("T")

_MOST = 200


class _Call(NamedTuple):
    attempt_id: str
    transition: Callable[[Transaction], Any]
    done: asyncio.Future[Any]


class Combiner:
    """Runs transitions about attempts, together where they come together."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._waiting: list[_Call] = []
        self._draining: asyncio.Task[None] | None = None

    async def write(self, attempt_id: str, transition: Callable[[Transaction], T]) -> T:
        """As `Ledger.write`, for a transition that begins with this attempt and its job.

        Raises:
            Exception: what the transition raises; the others are not touched by it.
        """
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Call(attempt_id, transition, done))
        if self._draining is None or self._draining.done():
            self._draining = asyncio.create_task(self._drain(), name="combining")
        return await done

    async def _drain(self) -> None:
        while self._waiting:
            calls, self._waiting = self._waiting[:_MOST], self._waiting[_MOST:]
            try:
                results = await self._ledger.write(functools.partial(_apply, calls=calls))
            except Exception as error:
                await self._one_by_one(calls, error)
                continue
            for call, result in zip(calls, results, strict=True):
                if not call.done.done():
                    call.done.set_result(result)

    async def _one_by_one(self, calls: Sequence[_Call], error: Exception) -> None:
        """One of several was refused, and all were undone: each gets a transaction of its own."""
        for call in calls:
            try:
                result = None if len(calls) == 1 else await self._ledger.write(call.transition)
                failure = error if len(calls) == 1 else None
            except Exception as own:
                result, failure = None, own
            if call.done.done():
                continue
            if failure is not None:
                call.done.set_exception(failure)
            else:
                call.done.set_result(result)


def _apply(tx: Transaction, calls: Sequence[_Call]) -> list[Any]:
    tx.load([call.attempt_id for call in calls])
    return [call.transition(tx) for call in calls]
