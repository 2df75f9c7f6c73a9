"""Lines of output as people read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainyard.cli import terminal, words

if TYPE_CHECKING:
    from trainyard_protos.v1.common_pb2 import LogLine

AGENT = -1
_COLOURS = ("cyan", "green", "yellow", "blue", "red")


@dataclass(frozen=True, slots=True)
class LineFormat:
    """How lines of a job are written; the rank leads when the job has several workers."""

    workers: int
    times: bool = False

    def text(self, line: LogLine) -> str:
        text = terminal.clean(line.text) if terminal.is_terminal() else line.text
        time = terminal.styled(words.clock(line.time_ns), "dim") + " " if self.times else ""
        return f"{time}{self._who(line)}{text}"

    def _who(self, line: LogLine) -> str:
        if line.stream == "stacks":
            return terminal.styled(f"[rank {line.rank} stack] ", "dim")
        if line.rank == AGENT or line.stream == "agent":
            return terminal.styled("[agent] ", "dim")
        if self.workers == 1:
            return ""
        return terminal.styled(f"[rank {line.rank}] ", _COLOURS[line.rank % len(_COLOURS)])
