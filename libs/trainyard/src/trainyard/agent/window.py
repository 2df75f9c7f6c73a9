"""What was sent on one stream and is not yet acknowledged."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable

from trainyard_protos.v1 import metrics_pb2

from trainyard.agent.sources import Source

MAX_BYTES = 2 * 1024 * 1024


class Window:
    """A bound on bytes under way, and every writer's place.

    Attributes:
        next_seq: of every writer whose place is known, the first number not yet sent.
    """

    def __init__(self) -> None:
        self.next_seq: dict[str, int] = {}
        self._sources: dict[str, Source] = {}
        self._under_way: dict[str, deque[tuple[int, int]]] = {}  # writer -> end and size of each batch, in order
        self._bytes = 0
        self._turns: dict[str, int] = {}  # writer -> when it was last served
        self._heard_s = time.monotonic()

    @property
    def has_room(self) -> bool:
        return self._bytes < MAX_BYTES

    @property
    def idle(self) -> bool:
        """Everything that was sent is acknowledged."""
        return self._bytes == 0

    def by_turn(self, writer_ids: Iterable[str]) -> list[str]:
        """The one that was served longest ago first."""
        return sorted(writer_ids, key=lambda writer_id: self._turns.get(writer_id, 0))

    def sent(self, source: Source, batch: metrics_pb2.AppendRequest) -> None:
        """A batch is on its way."""
        writer_id = source.writer_id
        if self.idle:
            self._heard_s = time.monotonic()
        end = batch.first_seq + (batch.rows.count or len(batch.lines.lines))
        size = batch.ByteSize()
        self._bytes += size
        self._turns[writer_id] = max(self._turns.values(), default=0) + 1
        self._sources[writer_id] = source
        self._under_way.setdefault(writer_id, deque()).append((end, size))
        self.next_seq[writer_id] = end

    def acknowledged(self, answer: metrics_pb2.AppendResponse) -> None:
        """Everything below the answer's number is stored."""
        self._heard_s = time.monotonic()
        batches = self._under_way.get(answer.writer_id, deque())
        while batches and batches[0][0] <= answer.next_seq:
            self._bytes -= batches.popleft()[1]
        if answer.writer_id in self._sources:
            self._sources[answer.writer_id].acknowledge(answer.next_seq)

    def check(self, timeout_s: float) -> None:
        """
        Raises:
            TimeoutError: something is under way, and nothing was heard for so long.
        """
        if not self.idle and time.monotonic() - self._heard_s > timeout_s:
            raise TimeoutError
