"""Follows the workers' output files.

The workers write to files and the agent tails them: neither a slow nor a dead agent ever stops a `print`.

With lines goes the place where whoever comes after this agent would have to read on: all before it is in these lines
and earlier ones, or was dropped.
"""

from __future__ import annotations

import asyncio
import os
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from inotify_simple import Event, flags

from trainyard.agent.changes import Changes
from trainyard.agent.lines import Flood, LineSplitter

READ_BYTES = 256 * 1024
# Further behind than that, the agent reads on near the end: a worker that floods writes faster than anyone reads.
MAX_BEHIND_BYTES = 64 * 1024 * 1024
KEPT_BYTES = 8 * 1024 * 1024
# Writes that come closer together than this are read together.
GATHER_S = 0.02

Sink = Callable[[int, list[str], bytes], None]
"""Takes rank, lines and place."""

_PLACE = struct.Struct("<4Q")  # offset in the file, and the flood's state


class _File:
    """One worker's output."""

    def __init__(self, rank: int, path: Path, flood: Flood, place: bytes) -> None:
        self.rank = rank
        self._fd = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._splitter = LineSplitter()
        self._flood = flood
        if place:
            offset, *state = _PLACE.unpack(place)
            os.lseek(self._fd, offset, os.SEEK_SET)
            flood.resume(*state)

    @property
    def place(self) -> bytes:
        """Where to read on."""
        offset = os.lseek(self._fd, 0, os.SEEK_CUR) - self._splitter.pending
        return _PLACE.pack(offset, *self._flood.state)

    def read(self) -> tuple[bool, list[str]]:
        """Whether there was anything, and the lines it completed."""
        data = os.read(self._fd, READ_BYTES)
        if not data:
            return False, []
        lines = self._flood.admit(self._splitter.feed(data), time.monotonic())
        return True, lines + self._catch_up() if len(data) == READ_BYTES else lines

    def _catch_up(self) -> list[str]:
        """Skips what is too far behind; the line that was begun there."""
        at = os.lseek(self._fd, 0, os.SEEK_CUR)
        behind = os.fstat(self._fd).st_size - at
        if behind <= MAX_BEHIND_BYTES:
            return []
        os.lseek(self._fd, at + behind - KEPT_BYTES, os.SEEK_SET)
        begun = self._flood.admit(self._splitter.end(), time.monotonic())
        self._flood.skip(behind - KEPT_BYTES)
        return begun

    def end(self) -> list[str]:
        return self._flood.admit(self._splitter.end(), time.monotonic()) + self._flood.mark()

    def close(self) -> None:
        os.close(self._fd)


class Output:
    """Tails `rank-R.log` of every rank and hands lines to `sink(rank, lines, place)`."""

    def __init__(
        self,
        files: Mapping[int, Path],
        sink: Sink,
        flood: Callable[[], Flood] = Flood,
        places: Mapping[int, bytes] | None = None,
    ) -> None:
        """
        Args:
            places: by rank, where to begin; at the start without.
        """
        self._paths = list(files.values())
        self._files = [_File(rank, path, flood(), (places or {}).get(rank, b"")) for rank, path in files.items()]
        self._sink = sink
        self._grew = asyncio.Event()

    def _notice(self, _event: Event | None) -> None:
        self._grew.set()

    async def follow(self, changes: Changes) -> None:
        """Runs until cancelled."""
        for path in self._paths:
            changes.watch(path, flags.MODIFY, self._notice)
        try:
            while True:
                self._grew.clear()
                await self._read_all()
                await self._grew.wait()
                await asyncio.sleep(GATHER_S)
        finally:
            changes.forget(self._notice)

    async def _read_all(self) -> None:
        growing = list(self._files)
        while growing:
            growing = [file for file in growing if self._read(file)]
            await asyncio.sleep(0)  # a worker that never stops printing must not stop everything else

    def _read(self, file: _File) -> bool:
        more, lines = file.read()
        self._hand_on(file, lines)
        return more

    def _hand_on(self, file: _File, lines: list[str]) -> None:
        if lines:
            self._sink(file.rank, lines, file.place)

    async def drain(self) -> None:
        """The rest, when the workers have ended. Stop `follow` before."""
        await self._read_all()
        for file in self._files:
            self._hand_on(file, file.end())
            file.close()
