"""The one rule for what the agent does beside the workers: a defect in it is told, and never ends training."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

CHECKPOINTS = "checkpoints"
OUTPUTS = "outputs"
RECORDS = "logs and points"
READING_OUTPUT = "reading the output"
READING_TRACKERS = "reading the trackers"
MEASURING = "measuring the workers"
TALKING = "talking to the launcher"
CARRYING = (CHECKPOINTS, OUTPUTS, RECORDS, READING_OUTPUT, READING_TRACKERS)
"""Parts that a job's products depend on: what they could not do is not stored."""

TRIES = 3
# A part that went on for so long before it failed is not broken for good.
LASTED_S = 60.0
FIRST_PAUSE_S = 0.1


class Parts:
    """Runs parts of the agent whose failure is not the workers' failure.

    Attributes:
        failed: what went wrong and was not made good, in words, by part.
        unstored: of that, what keeps products from being stored.
    """

    def __init__(self, note: Callable[[str, str], None]) -> None:
        """
        Args:
            note: takes reason and text of what should be an event of the job.
        """
        self._note = note
        self.failed: dict[str, str] = {}

    @property
    def unstored(self) -> list[str]:
        return [self.failed[part] for part in CARRYING if part in self.failed]

    @contextmanager
    def guard(self, part: str) -> Iterator[None]:
        """What is done inside may fail without harm to anything else; its success makes an earlier failure good."""
        self.failed.pop(part, None)
        try:
            yield
        except Exception as error:
            traceback.print_exc()  # to the agent's log
            self.failed[part] = f"{part}: {type(error).__name__}: {error}"
            self._note("AgentDefect", f"{self.failed[part]}; training goes on")

    def run(self, part: str, work: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        """Does `work` in the background. When it fails it begins again; after `TRIES` in a row it is given up."""
        return asyncio.create_task(self._run(part, work))

    async def _run(self, part: str, work: Callable[[], Awaitable[None]]) -> None:
        now = asyncio.get_running_loop().time
        tries = 0
        while tries < TRIES:
            began = now()
            with self.guard(part):
                await work()
            if part not in self.failed:
                return
            tries = 1 if now() - began > LASTED_S else tries + 1
            await asyncio.sleep(FIRST_PAUSE_S * 2**tries)
