"""The view on a terminal: output scrolls, and the job's state and progress stay on the last line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from trainyard.cli import terminal, words
from trainyard.cli.bars import LineColumn
from trainyard.cli.live_line import LiveLine
from trainyard.cli.run.views import PlainView, state_of
from trainyard.client import states
from trainyard.client.names import SYSTEM_PREFIX

if TYPE_CHECKING:
    from trainyard_protos.v1 import common_pb2
    from trainyard_protos.v1 import scheduler_pb2 as pb

_SHOWN_METRICS = 4
_NO_PROGRESS = frozenset({"queued", "starting"})


class JobLine:
    """What the live line shows of a job: follows its events and its progress."""

    def __init__(self, name: str, state: str) -> None:
        self._name, self._state = name, state
        self._why_queued = ""
        self._progress: common_pb2.Progress | None = None

    def waits(self, pending: pb.Pending) -> None:
        self._why_queued = words.because(pending.reason, pending.message)

    def happened(self, event: pb.Event) -> None:
        self._state = state_of(event)
        if event.type == "Requeued":
            self._why_queued = words.because(event.reason, event.message)
        if self._state in _NO_PROGRESS:
            self._progress = None  # the next attempt has its own

    def progressed(self, progress: common_pb2.Progress) -> None:
        self._progress = progress

    def line(self) -> LiveLine:
        """The line as it is now."""
        progress = self._progress
        if progress is None:
            return LiveLine(self._name, self._state, others=[self._why_queued] if self._state == "queued" else [])
        total = progress.total_steps
        step = f"step {progress.step}/{total}" if total else f"step {progress.step}"
        own = sorted((name, value) for name, value in progress.metrics.items() if not name.startswith(SYSTEM_PREFIX))
        return LiveLine(
            self._name,
            self._state,
            done=progress.step / total if total else None,
            seconds_left=progress.seconds_left if progress.HasField("seconds_left") else None,
            others=[step, *(f"· {name} {words.number(value)}" for name, value in own[:_SHOWN_METRICS])],
        )


class LiveView(PlainView):
    """The plain view, above a line that is kept up to date."""

    def __init__(self, job: pb.Job) -> None:
        super().__init__(job)
        self._console = Console(highlight=False)
        self._line = JobLine(job.name, states.name(job.state))
        column = LineColumn(lambda _: self._line.line())
        self._bar = Progress(column, console=self._console, expand=True, transient=True)
        self._bar.add_task("")
        self._bar.start()

    def waits(self, pending: pb.Pending) -> None:
        self._line.waits(pending)

    def happened(self, event: pb.Event) -> None:
        super().happened(event)
        self._line.happened(event)

    def show(self, text: str) -> None:
        self._console.print(Text.from_ansi(terminal.clean(text)), soft_wrap=True)

    def progressed(self, progress: common_pb2.Progress) -> None:
        self._line.progressed(progress)

    def close(self) -> None:
        self._bar.stop()

    def note(self, text: str) -> None:
        lines = "\n".join(map(terminal.plain, text.splitlines()))
        self._console.print(Text.assemble(("yard: ", "dim"), lines), soft_wrap=True)
