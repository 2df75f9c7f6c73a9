"""The view on a terminal: output scrolls, and the job's state and progress stay on the last line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn
from rich.text import Text

from trainyard.cli import terminal, words
from trainyard.cli.bars import PlainColumn
from trainyard.cli.run.views import PlainView, state_of, waiting

if TYPE_CHECKING:
    from trainyard_protos.v1 import common_pb2
    from trainyard_protos.v1 import scheduler_pb2 as pb

_SHOWN_METRICS = 4


class LiveView(PlainView):
    """The plain view, above a line that is kept up to date."""

    def __init__(self, job: pb.Job) -> None:
        super().__init__(job)
        self._console = Console(highlight=False)
        self._bar = Progress(
            SpinnerColumn(),
            PlainColumn(),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            PlainColumn("facts"),
            console=self._console,
            transient=True,
        )
        self._task = self._bar.add_task(job.name, total=None, facts="")
        self._bar.start()

    def submitted(self, job: pb.Job) -> None:
        super().submitted(job)
        self._describe(f"{job.name} queued")

    def waits(self, pending: pb.Pending) -> None:
        if pending.reason:
            self._describe(waiting(pending))

    def happened(self, event: pb.Event) -> None:
        super().happened(event)
        self._describe(f"{self._name} {state_of(event)}")

    def show(self, text: str) -> None:
        self._console.print(Text.from_ansi(terminal.clean(text)), soft_wrap=True)

    def progressed(self, progress: common_pb2.Progress) -> None:
        facts = [f"step {progress.step}{f'/{progress.total_steps}' if progress.total_steps else ''}"]
        own = sorted((name, value) for name, value in progress.metrics.items() if not name.startswith("system/"))
        facts += [f"{name} {words.number(value)}" for name, value in own[:_SHOWN_METRICS]]
        if progress.HasField("seconds_left"):
            facts.append(f"{words.duration(progress.seconds_left)} left")
        total = progress.total_steps or None
        self._bar.update(self._task, total=total, completed=progress.step, facts=" · ".join(facts))

    def close(self) -> None:
        self._bar.stop()

    def note(self, text: str) -> None:
        lines = "\n".join(map(terminal.plain, text.splitlines()))
        self._console.print(Text.assemble(("yard: ", "dim"), lines), soft_wrap=True)

    def _describe(self, text: str) -> None:
        self._bar.update(self._task, description=text)
