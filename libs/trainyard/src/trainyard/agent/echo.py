"""What the workers print, and what the agent says, once more on the agent's own output: `kubectl logs` shows it.

A reader that does not read must not hold up training: what the pipe has no room for is left out here, and is in the
yard's logs all the same.
"""

from __future__ import annotations

import select
from os import write

from trainyard_protos.v1 import common_pb2

from trainyard.agent.journal import AGENT_RANK, Journal

_AT_ONCE = select.PIPE_BUF  # so much a pipe takes without waiting when it says that it takes anything


class Echo:
    """Writes a journal's new lines to a descriptor.

    Args:
        several: whether lines have to say which worker they are of.
    """

    def __init__(self, journal: Journal, *, several: bool, descriptor: int = 1) -> None:
        self._journal = journal
        self._several = several
        self._descriptor = descriptor
        self._next = journal.spool.next_seq
        self._ready = select.poll()
        self._ready.register(descriptor, select.POLLOUT)
        journal.tell(self._write_new)

    def _write_new(self) -> None:
        fresh = []
        for line in reversed(self._journal.live):
            if line.seq < self._next:
                break
            fresh.append(line)
        for line in reversed(fresh):
            self._next = line.seq + 1
            self._write(f"{self._who(line)}{line.text}\n".encode())

    def _who(self, line: common_pb2.LogLine) -> str:
        if line.rank == AGENT_RANK:
            return "trainyard: "
        return f"[{line.rank}] " if self._several else ""

    def _write(self, data: bytes) -> None:
        for start in range(0, len(data), _AT_ONCE):
            if not any(events & select.POLLOUT for _, events in self._ready.poll(0)):
                return
            write(self._descriptor, data[start : start + _AT_ONCE])
