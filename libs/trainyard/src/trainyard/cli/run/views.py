"""What `yard run` shows while a job runs.

On a terminal, output with a line below it that is kept up to date; in a pipe, plain lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from trainyard.cli import terminal, words
from trainyard.cli.lines import AGENT, LineFormat
from trainyard.client import states

if TYPE_CHECKING:
    from trainyard_protos.v1 import common_pb2
    from trainyard_protos.v1 import scheduler_pb2 as pb

_TOLD = frozenset({"Running", "Requeued", "Note", "Stopping", "RetriedByUser"})
"""Types of events that people want to see; the rest is in `yard events`."""


class View(Protocol):
    """Is told what happens to a job."""

    def submitted(self, job: pb.Job) -> None: ...
    def waits(self, pending: pb.Pending) -> None: ...
    def starts_slowly(self, summary: str) -> None: ...
    def happened(self, event: pb.Event) -> None: ...
    def wrote(self, lines: Sequence[common_pb2.LogLine]) -> None: ...
    def lost(self, count: int) -> None: ...
    def progressed(self, progress: common_pb2.Progress) -> None: ...
    def close(self) -> None: ...


def make_view(job: pb.Job) -> View:
    """The view for standard output as it is."""
    if not terminal.is_terminal():
        return PlainView(job)
    from trainyard.cli.run.live import LiveView

    return LiveView(job)


class PlainView:
    """Lines of output as they are, and the yard's own lines marked as such."""

    def __init__(self, job: pb.Job) -> None:
        self._form = LineFormat(workers=job.nodes * job.workers_per_node)
        self._name = job.name
        self._waited = False

    def submitted(self, job: pb.Job) -> None:
        self.note(f"{job.name} submitted ({job.id})")

    def waits(self, pending: pb.Pending) -> None:
        if pending.reason:
            self.note(waiting(pending))

    def starts_slowly(self, summary: str) -> None:
        self.note(summary)

    def happened(self, event: pb.Event) -> None:
        if event.type in _TOLD:
            self.note(told(event))

    def wrote(self, lines: Sequence[common_pb2.LogLine]) -> None:
        for line in lines:
            if line.rank != AGENT:
                self.show(self._form.text(line))

    def show(self, text: str) -> None:
        """One line of output, ready to be read."""
        terminal.say(text)

    def lost(self, count: int) -> None:
        self.note(f"{words.plural(count, 'line')} of output lost")

    def progressed(self, progress: common_pb2.Progress) -> None:
        """Not shown in a pipe: the script's own lines are enough there."""

    def close(self) -> None:
        """Nothing stays open."""

    def note(self, text: str) -> None:
        terminal.say(f"{terminal.styled('yard:', 'dim')} {text}")


def waiting(pending: pb.Pending) -> str:
    """Why a job waits, in words."""
    return f"queued: {pending.reason}: {pending.message}"


def told(event: pb.Event) -> str:
    """What happened, in words."""
    why = words.because(event.reason, event.message)
    what = event.type.lower() if event.type != "Note" else "note"
    attempt = f", attempt {event.attempt}" if event.type == "Running" and event.attempt > 1 else ""
    return f"{what}{attempt}{f' ({why})' if why else ''}"


def state_of(event: pb.Event) -> str:
    """The state after an event, as it is shown."""
    return states.name(event.state)
