"""The compactor as the server sees it: started when there is work, ended when there is none."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainyard.proc import Process, process_of, send_signal

from trainyard_metrics.storage.files import Damaged
from trainyard_metrics.storage.made import Made, made_of
from trainyard_metrics.storage.manifest import ColumnFile

_MAX_ANSWER = 256 * 1024 * 1024


class CompactorFailed(Exception):
    """The process ended, or did not answer in time."""


class Compactor:
    """Runs jobs one after the other.

    Args:
        deadline_s: of one job.
        idle_s: after this long without a job the process ends.
    """

    def __init__(self, deadline_s: float = 900, idle_s: float = 15) -> None:
        self._deadline_s = deadline_s
        self._idle_s = idle_s
        self._process: asyncio.subprocess.Process | None = None
        self._seen: Process | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._one = asyncio.Lock()
        self._ending: set[asyncio.Task[None]] = set()

    async def compact(self, folder: Path, segment: int) -> Made:
        """Column files of a segment.

        Raises:
            Damaged, OSError: see `compaction.compact`.
            CompactorFailed
        """
        return await self._run({"folder": str(folder), "segment": segment})

    async def merge(self, folder: Path, files: Sequence[ColumnFile]) -> Made:
        """One file of several.

        Raises:
            Damaged, OSError: see `compaction.merge`.
            CompactorFailed
        """
        return await self._run({"folder": str(folder), "files": [asdict(file) for file in files]})

    async def close(self) -> None:
        """Ends the process, also amid a job."""
        if self._idle is not None:
            self._idle.cancel()
        await self._end()
        await asyncio.gather(*self._ending)

    async def _run(self, job: dict[str, Any]) -> Made:
        async with self._one:
            if self._idle is not None:
                self._idle.cancel()
            try:
                answer = await asyncio.wait_for(self._ask(job), self._deadline_s)
            except BaseException as error:
                await self._end()
                if isinstance(error, TimeoutError | OSError | ValueError):
                    raise CompactorFailed(f"no answer from the compactor: {type(error).__name__} {error}") from error
                raise
            self._idle = asyncio.get_running_loop().call_later(self._idle_s, self._end_soon)
        return _made(answer)

    async def _ask(self, job: dict[str, Any]) -> dict[str, Any]:
        process = await self._started()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(job).encode() + b"\n")
        await process.stdin.drain()
        answer = await process.stdout.readline()
        if not answer:
            raise ConnectionResetError("it ended")
        found: dict[str, Any] = json.loads(answer)
        return found

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "trainyard_metrics.storage.compactor",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_MAX_ANSWER,
            )
            self._seen = process_of(self._process.pid)
        return self._process

    def _end_soon(self) -> None:
        task = asyncio.create_task(self._end_idle(), name="end compactor")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _end_idle(self) -> None:
        async with self._one:
            await self._end()

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if self._seen is not None:
            send_signal(self._seen.pid, self._seen.start_time, signal.SIGKILL)
        await process.wait()


def _made(answer: dict[str, Any]) -> Made:
    if "damaged" in answer:
        path, offset, what = answer["damaged"]
        raise Damaged(Path(path), offset, what)
    if "error" in answer:
        raise OSError(answer["errno"], answer["error"])
    return made_of(answer["made"])
