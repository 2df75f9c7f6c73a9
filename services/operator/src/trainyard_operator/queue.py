"""What is to be done, by key: each key once, never by two workers at a time, again after a pause when it fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)

_PAUSE_MAX_S = 60.0


class Later(Exception):
    """The work cannot be done now; the message says why."""


class Queue:
    """Keys that wait for `work`.

    Args:
        work: does what is to be done for a key. Raises Later when it has to be tried again.
        workers: how many keys are worked on at once.
        pause_s: before the first new try; it doubles up to a minute.
    """

    def __init__(self, work: Callable[[str], Awaitable[None]], workers: int, pause_s: float) -> None:
        self._work = work
        self._count = workers
        self._pause_s = pause_s
        self._line: asyncio.Queue[str] = asyncio.Queue()
        self._waiting: set[str] = set()  # those in line, each once
        self._busy: dict[str, bool] = {}  # whether it was asked for again meanwhile
        self._failures: dict[str, int] = {}
        self._workers: list[asyncio.Task[None]] = []

    def add(self, key: str) -> None:
        """Something is to be done for this key, soon."""
        if key in self._busy:
            self._busy[key] = True
        elif key not in self._waiting:
            self._waiting.add(key)
            self._line.put_nowait(key)

    def start(self) -> None:
        self._workers = [asyncio.create_task(self._run(), name=f"worker {index}") for index in range(self._count)]

    async def stop(self) -> None:
        for worker in self._workers:
            worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            key = await self._line.get()
            self._waiting.remove(key)
            self._busy[key] = False
            try:
                await self._try(key)
            finally:
                if self._busy.pop(key):
                    self.add(key)

    async def _try(self, key: str) -> None:
        try:
            await self._work(key)
            self._failures.pop(key, None)
        except Later as why:
            self._again(key, str(why))
        except Exception:
            logger.exception("a resource could not be handled", extra={"uid": key})
            self._again(key, "a defect of the operator")

    def _again(self, key: str, why: str) -> None:
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        pause_s = min(_PAUSE_MAX_S, self._pause_s * 2 ** min(failures - 1, 10))
        logger.info("tried again later", extra={"uid": key, "pause_s": pause_s, "why": why})
        asyncio.get_running_loop().call_later(pause_s, self.add, key)
