"""The newest lines of an attempt, in the order they came, bounded in lines and bytes.

Readers keep a cursor of their own and read at their own pace; what was evicted before they came to it is reported to
them as a gap. So no reader ever holds up a writer, and none costs memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from trainyard_protos.v1 import common_pb2

_PORTION_BYTES = 256 * 1024
_LINE_OVERHEAD_BYTES = 200  # of a message object and its place in the deque


@dataclass(slots=True)
class Cursor:
    """How far a reader is: the place in the order of arrival, and per node the first line it still wants."""

    place: int = 0
    next_seq: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Gap:
    """Lines `from_seq` up to, not including, `to_seq` of a node that are not in memory."""

    node: int
    from_seq: int
    to_seq: int


class Ring:
    """Bounded memory of lines.

    Args:
        max_lines: how many lines at most.
        max_bytes: how much memory at most, roughly; one line always stays.
    """

    __slots__ = ("_bytes", "_lines", "_max_bytes", "_max_lines", "_next_seq", "_place")

    def __init__(self, max_lines: int, max_bytes: int) -> None:
        self._max_lines = max_lines
        self._max_bytes = max_bytes
        self._lines: deque[common_pb2.LogLine] = deque()
        self._bytes = 0
        self._place = 0  # in the order of arrival, of the oldest line
        self._next_seq: dict[int, int] = {}

    def append(self, lines: Iterable[common_pb2.LogLine]) -> bool:
        """Adds lines; those that came before are skipped, for an agent repeats some when it reconnects.

        Returns:
            Whether any was new.
        """
        before = self._place + len(self._lines)
        for line in lines:
            if line.seq < self._next_seq.get(line.node, 0):
                continue
            self._next_seq[line.node] = line.seq + 1
            self._lines.append(line)
            self._bytes += _size(line)
        added = self._place + len(self._lines) > before
        self._evict()
        return added

    def _evict(self) -> None:
        while len(self._lines) > self._max_lines or (self._bytes > self._max_bytes and len(self._lines) > 1):
            self._bytes -= _size(self._lines.popleft())
            self._place += 1

    def read(self, cursor: Cursor, limit: int) -> list[common_pb2.LogLine | Gap]:
        """The next lines for a reader, at most `limit`, with a `Gap` where some are missing; moves the cursor. Long
        lines come in smaller portions: a reader that stands still holds one."""
        cursor.place = max(cursor.place, self._place)
        found: list[common_pb2.LogLine | Gap] = []
        room = _PORTION_BYTES
        for line in _slice(self._lines, cursor.place - self._place, limit):
            if room <= 0:
                break
            room -= _size(line)
            cursor.place += 1
            wanted = cursor.next_seq.get(line.node, 0)
            if line.seq < wanted:
                continue
            if line.seq > wanted:
                found.append(Gap(line.node, wanted, line.seq))
            cursor.next_seq[line.node] = line.seq + 1
            found.append(line)
        return found

    def rest(self, cursor: Cursor) -> list[Gap]:
        """What a reader that has read everything here still lacks: lines after which none of their node is kept."""
        wanted = {node: cursor.next_seq.get(node, 0) for node in self._next_seq}
        return [Gap(node, seq, self._next_seq[node]) for node, seq in wanted.items() if seq < self._next_seq[node]]

    def behind(self, cursor: Cursor) -> bool:
        """Whether there is more to read."""
        return cursor.place < self._place + len(self._lines)


def _slice(lines: deque[common_pb2.LogLine], begin: int, limit: int) -> list[common_pb2.LogLine]:
    # A deque is reached from both ends: a reader that keeps up reads near the right one.
    count = min(limit, len(lines) - begin)
    return [lines[begin + offset] for offset in range(count)]


def _size(line: common_pb2.LogLine) -> int:
    return len(line.text) + _LINE_OVERHEAD_BYTES
