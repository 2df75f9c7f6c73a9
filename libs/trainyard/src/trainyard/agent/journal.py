"""The lines of this node: numbered once, on disk until metrics has them, the newest in memory for live readers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

from trainyard_protos.v1 import common_pb2

from trainyard.agent.spool import Spool

LIVE_LINES = 1000
LAST_LINES = 20
AGENT_RANK = -1


class Journal:
    """Takes lines from the workers and from the agent itself; says so to whoever asked to be told.

    Attributes:
        lost: how many of the newest lines a full disk had no room for.
    """

    def __init__(self, spool: Spool, node: int) -> None:
        self._node = node
        self._listeners: list[Callable[[], None]] = []
        self.lost = 0
        self._last: dict[int, deque[str]] = {}
        self.spool = spool
        self.live: deque[common_pb2.LogLine] = deque(maxlen=LIVE_LINES)

    def tell(self, listener: Callable[[], None]) -> None:
        """Calls `listener` after lines were added."""
        self._listeners.append(listener)

    def add(self, rank: int, texts: Iterable[str], stream: str) -> None:
        """Lines about a worker."""
        self._add(rank, texts, stream)

    def _add(self, rank: int, texts: Iterable[str], stream: str, place: bytes = b"") -> None:
        """Numbers lines and stores them. What a full disk has no room for is counted, and named by a later line."""
        now = time.time_ns()
        texts = list(texts)
        if self.lost:
            texts.insert(0, f"[trainyard: {self.lost:,} lines were lost, the disk of this machine was full]")
        lines = [
            common_pb2.LogLine(seq=seq, time_ns=now, node=self._node, rank=rank, stream=stream, text=text)
            for seq, text in enumerate(texts, self.spool.next_seq)
        ]
        if not lines:
            return
        try:
            self.spool.append([line.SerializeToString() for line in lines], rank if place else None, place)
        except OSError:
            self.lost += len(lines) - bool(self.lost)
            return
        self.lost = 0
        self.live.extend(lines)
        if stream == "output":
            self._last.setdefault(rank, deque(maxlen=LAST_LINES)).extend(line.text for line in lines)
        for listener in self._listeners:
            listener()

    def output(self, rank: int, texts: Iterable[str], place: bytes) -> None:
        """Lines of a worker's output, which is read up to `place`."""
        self._add(rank, texts, "output", place)

    def say(self, text: str) -> None:
        """A line of the agent's own."""
        self._add(AGENT_RANK, [text], "agent")

    def last_lines(self, rank: int) -> list[str]:
        """The newest lines of a worker, at most 20."""
        return list(self._last.get(rank, ()))
