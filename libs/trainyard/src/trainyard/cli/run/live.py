"""The view on a terminal: output scrolls, and the job's state and progress stay on the last line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress, Task
from rich.text import Text

from trainyard.cli import terminal, words
from trainyard.cli.bars import LineColumn
from trainyard.cli.live_line import LiveLine
from trainyard.cli.run.views import PlainView, state_of
from trainyard.client import states

if TYPE_CHECKING:
    from trainyard_protos.v1 import common_pb2
    from trainyard_protos.v1 import scheduler_pb2 as pb

_SHOWN_METRICS = 4
_NO_PROGRESS = frozenset({"queued", "starting"})


class LiveView(PlainView):
    """The plain view, above a line that is kept up to date."""

    def __init__(self, job: pb.Job) -> None:
        super().__init__(job)
        self._console = Console(highlight=False)
        self._state = states.name(job.state)
        self._pending = ""
        self._progress: common_pb2.Progress | None = None
        self._bar = Progress(LineColumn(self._line), console=self._console, expand=True, transient=True)
        self._bar.add_task("")
        self._bar.start()

    def waits(self, pending: pb.Pending) -> None:
        self._pending = words.because(pending.reason, pending.message)

    def happened(self, event: pb.Event) -> None:
        super().happened(event)
        self._state = state_of(event)
        if self._state in _NO_PROGRESS:
            self._progress = None  # the next attempt has its own

    def show(self, text: str) -> None:
        self._console.print(Text.from_ansi(terminal.clean(text)), soft_wrap=True)

    def progressed(self, progress: common_pb2.Progress) -> None:
        self._progress = progress

    def close(self) -> None:
        self._bar.stop()

    def note(self, text: str) -> None:
        lines = "\n".join(map(terminal.plain, text.splitlines()))
        self._console.print(Text.assemble(("yard: ", "dim"), lines), soft_wrap=True)

    def _line(self, task: Task) -> LiveLine:
        return line_of(self._name, self._state, self._pending, self._progress)


def line_of(name: str, state: str, pending: str, progress: common_pb2.Progress | None) -> LiveLine:
    """What the live line shows of a job.

    Args:
        name: of the job.
        state: of the job.
        pending: why it is queued; "" when that is not known.
        progress: of its present attempt; None before it has reported any.
    """
    if progress is None:
        return LiveLine(name, state, others=[pending] if pending and state == "queued" else [])
    total = progress.total_steps
    others = [f"step {progress.step}/{total}" if total else f"step {progress.step}"]
    own = sorted((metric, value) for metric, value in progress.metrics.items() if not metric.startswith("system/"))
    others += [f"{metric} {words.number(value)}" for metric, value in own[:_SHOWN_METRICS]]
    return LiveLine(
        name,
        state,
        done=progress.step / total if total else None,
        seconds_left=progress.seconds_left if progress.HasField("seconds_left") else None,
        others=[others[0], *(f"· {each}" for each in others[1:])],
    )
