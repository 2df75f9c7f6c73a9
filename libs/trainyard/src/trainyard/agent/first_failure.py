"""Which worker of a node failed first, and which only because of it."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass

from trainyard.agent import failure_evidence
from trainyard.agent.contract import names_torchrun
from trainyard.agent.failure_evidence import Evidence
from trainyard.agent.gang import End
from trainyard.agent.plan import Plan


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """A worker that failed.

    Attributes:
        stopped: it ended after this agent had stopped the workers of the node.
        output_rank: under which its output is kept, where the installed torchrun wrote for it.
        last_lines: its last lines then.
    """

    end: End
    evidence: Evidence
    stopped: bool = False
    output_rank: int | None = None
    last_lines: tuple[str, ...] = ()

    @property
    def failed_ns(self) -> int:
        """When it failed: its exception comes before its end, which may take long."""
        return min(filter(None, (self.evidence.recorded_ns, self.end.time_ns)))

    @property
    def own(self) -> bool:
        """Whether it failed by itself. A worker that was stopped did so only if it has an exception of its own."""
        return not self.stopped or (self.evidence.exception is not None and not self.evidence.lost_peer)

    @property
    def cut_short(self) -> bool:
        """Whether its exit status is that of the stop, which came while it was ending after its exception."""
        return self.stopped and self.end.signal in ("SIGTERM", "SIGKILL")


def first(failures: Iterable[WorkerFailure]) -> WorkerFailure | None:
    """The failure that explains the others; None when no worker failed by itself.

    A worker that lost a peer often ends before the peer does, which still writes its traceback and ends its threads. So
    one that lost a peer explains a failure only where all others did as well.
    """
    own = [each for each in failures if each.own]
    return min(own, key=lambda each: (each.evidence.lost_peer, each.failed_ns), default=None)


def of_node(ends: Mapping[int, End], folder: str, plan: Plan, before_stop: Set[int]) -> WorkerFailure | None:
    """The failure that explains why the workers of this node ended; None when none failed by itself.

    Args:
        ends: how the workers ended, by rank.
        before_stop: the ranks that had ended when this agent began to stop the workers.
    """
    return first(_failure(end, folder, plan, end.rank not in before_stop) for end in ends.values() if end.failed)


def lost_its_peer(end: End, folder: str) -> bool:
    """Whether a worker ended because another one went away, as its own words say."""
    return failure_evidence.read(folder, end.rank).lost_peer


def _failure(end: End, folder: str, plan: Plan, stopped: bool) -> WorkerFailure:
    if names_torchrun(plan.command) and (found := failure_evidence.of_torchrun(folder, end.rank)):
        name = signal.Signals(-found.code).name if found.code < 0 else ""
        of_worker = End(found.rank, found.local_rank, None if name else found.code, name, end.time_ns)
        evidence = failure_evidence.read(folder, end.rank, found.rank)
        return WorkerFailure(of_worker, evidence, stopped, end.rank, tuple(found.lines))
    return WorkerFailure(end, failure_evidence.read(folder, end.rank), stopped)
