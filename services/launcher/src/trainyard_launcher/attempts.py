"""One attempt as the launcher sees it: a gang of nodes that start, fail and end together.

Pure bookkeeping: no clock, no process, no call. `Supervisor` feeds it and acts on what it says is due.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Protocol

from servicekit.clock import CLOCK
from trainyard.exit_meaning import was_killed
from trainyard_protos.v1 import common_pb2, launcher_pb2

from trainyard_launcher.backend import Facts, NodeEnd
from trainyard_launcher.ring import Ring

COMPLETED = "Completed"
STOPPED = "Stopped"
PEER_FAILED = "PeerFailed"
_TAKEN_AWAY = frozenset({"NodeLost", "Evicted", "PodDeleted"})
_REASON_OF_STOP = {"DeadlineExceeded": "DeadlineExceeded"}


class Phase(IntEnum):
    """How far a node is; it only grows."""

    STARTING = 1
    RUNNING = 2
    FINISHING = 3
    ENDED = 4

    @classmethod
    def named(cls, name: str) -> Phase:
        """Raises KeyError for a name that is no phase."""
        return cls[name.upper()]


class Session(Protocol):
    """The stream of a node's agent."""

    def send(self, command: launcher_pb2.AgentCommand) -> None: ...


class Node:
    """One node of an attempt."""

    __slots__ = (
        "exit",
        "failed_ns",
        "forced",
        "heard",
        "heard_ns",
        "index",
        "minted",
        "phase",
        "progressed",
        "resident_peak",
        "resumed_from",
        "session",
        "told",
        "workers",
    )

    def __init__(self, index: int, heard: float, minted: float) -> None:
        self.index = index
        self.phase = Phase.STARTING
        self.heard = heard  # on the clock of silence; when watching began, before the first word
        self.minted = minted  # when the token its agent has was made, in seconds since the epoch
        self.heard_ns = 0  # last heartbeat; 0 before the first
        self.session: Session | None = None
        self.workers: tuple[launcher_pb2.WorkerStatus, ...] = ()
        self.resumed_from = ""  # this and the next as the last heartbeat had them
        self.progressed = False
        self.resident_peak = 0  # of all its workers together, in bytes, as heartbeats had it
        self.failed_ns = 0  # when it failed, by its machine's clock or else by this one; 0: it has not
        self.exit: common_pb2.Exit | None = None
        self.told: common_pb2.Exit | None = None  # the final exit in the agent's own words, should its record be lost
        self.forced: common_pb2.Exit | None = None  # why the launcher itself ended it

    @property
    def failed(self) -> bool:
        """Whether its exit, so far as it is known, is a failure."""
        return self.exit is not None and self.exit.reason != COMPLETED


class Attempt:
    """An attempt from its claim until the scheduler has accepted its end.

    Args:
        facts: what does not change.
        now: on the clock of silence.
        minted: when its agents' tokens were made, in seconds since the epoch.
    """

    __slots__ = (
        "_deadline_ns",
        "facts",
        "first_failure",
        "nodes",
        "progress",
        "reported",
        "ring",
        "stop_reason",
        "timer",
        "unstarted",
        "watchers",
    )

    def __init__(self, facts: Facts, now: float, minted: float) -> None:
        self.facts = facts
        # By the steady clock, as the scheduler counts it.
        self._deadline_ns = CLOCK.steady_ns() + facts.deadline_ns - CLOCK.utc_ns()
        self.nodes = [Node(index, now, minted) for index in range(facts.nodes)]
        self.reported = Phase.STARTING
        self.first_failure: int | None = None
        self.stop_reason = ""
        self.timer: asyncio.TimerHandle | None = None
        self.unstarted: tuple[int, ...] = ()
        self.progress: common_pb2.Progress | None = None
        self.ring: Ring | None = None
        self.watchers: set[asyncio.Event] | None = None

    @property
    def past_deadline(self) -> bool:
        """Whether it is past the deadline of its job."""
        return self.facts.deadline_ns > 0 and CLOCK.steady_ns() >= self._deadline_ns

    @property
    def over(self) -> bool:
        """Whether every node has ended."""
        return all(node.phase is Phase.ENDED for node in self.nodes)

    def advance(self, index: int, phase: Phase, exit: common_pb2.Exit | None = None) -> None:
        """A node is at least so far; an older phase than the known one says nothing new."""
        node = self.nodes[index]
        if phase < node.phase or (node.phase is Phase.ENDED):
            return
        if exit is not None and self.stop_reason == PEER_FAILED:
            _name_failure(exit)
        node.phase = phase
        if exit is not None:
            node.exit = exit
        if node.exit is not None and node.failed:
            node.failed_ns = node.exit.failed_ns or node.failed_ns or CLOCK.utc_ns()
            if self.first_failure is None:
                self.first_failure = index

    def stops(self, phase: Phase) -> bool:
        """Whether a node that is so far has to stop. The failure of a peer is no reason for one whose workers ended:
        it is storing what they made, and the node that failed is one of those."""
        return bool(self.stop_reason) and (self.stop_reason != PEER_FAILED or phase < Phase.FINISHING)

    def due(self) -> Iterator[Phase]:
        """Phases all nodes have reached and nobody was told of, in order; each is due once.

        An end says everything: phases that were passed unseen on the way to it are not told.
        """
        reached = min(node.phase for node in self.nodes)
        first = Phase.ENDED if reached is Phase.ENDED else Phase(self.reported + 1)
        for phase in Phase:
            if first <= phase <= reached and phase > self.reported:
                self.reported = phase
                yield phase

    def verdict(self) -> common_pb2.Exit:
        """The exit of the first failing node; what all nodes have in common, when none failed."""
        verdict = common_pb2.Exit(reason=COMPLETED, exit_code=0, acknowledged=True)
        known = [node.exit for node in self.nodes if node.exit is not None]
        decisive = self._decisive()
        if decisive is not None:
            first = self.nodes[decisive].exit
            assert first is not None
            verdict.CopyFrom(first)
            if not verdict.HasField("node"):
                verdict.node = decisive
        elif known:
            verdict.message = known[0].message
            verdict.resumed_from = known[0].resumed_from
        verdict.acknowledged = len(known) == len(self.nodes) and all(exit.acknowledged for exit in known)
        verdict.progressed = any(exit.progressed for exit in known)
        self._tell_progress(verdict, known)
        del verdict.unstored[:]
        verdict.unstored.extend(text for exit in known for text in exit.unstored)
        return verdict

    def _tell_progress(self, verdict: common_pb2.Exit, known: list[common_pb2.Exit]) -> None:
        """The furthest that any node came: a node without a record is as far as it was heard of."""
        found = [exit.progress for exit in known if exit.HasField("progress")]
        if self.progress is not None:
            found.append(self.progress)
        if found:
            far, total = max(found, key=_distance), max(each.total_steps for each in found)
            verdict.progress.CopyFrom(common_pb2.Progress(step=far.step, total_steps=total, updated_ns=far.updated_ns))

    def _decisive(self) -> int | None:
        """The node that explains the failure: one that was taken away, for its peers fail because of it and are often
        heard first; else the one that failed first.

        What is heard first says little: a node reports its failure after its other workers have ended. One that was
        stopped, or says that it lost another worker, explains nothing as long as another node does.
        """
        failed = [node for node in self.nodes if node.failed]
        taken = (node.index for node in failed if node.exit is not None and node.exit.reason in _TAKEN_AWAY)
        first = min(failed, key=_explains, default=None)
        return next(taken, None if first is None else first.index)

    def explained(
        self, index: int, exit: common_pb2.Exit, cause: common_pb2.Exit | None, *, presumed: bool = False
    ) -> common_pb2.Exit:
        """A record that says no more than that the node was told to stop, by nobody of ours: the backend knows why.

        Peers are stopped because of such a node: that is no wish of ours that it should end. A cause that is only
        presumed explains nothing but the first failure.
        """
        if presumed and self.first_failure not in (None, index):
            return exit
        if cause is not None and exit.reason == STOPPED and self.stop_reason in ("", PEER_FAILED):
            exit.reason, exit.message = cause.reason, cause.message
        return exit

    def with_memory(self, record: common_pb2.Exit, end: NodeEnd) -> common_pb2.Exit:
        """The record of a node's agent, with what the backend knows of its memory: that memory ran out explains a
        worker that was killed."""
        exit = common_pb2.Exit()
        exit.CopyFrom(record)
        if not exit.HasField("memory") and (memory := _memory(self.nodes[end.node], end)) is not None:
            exit.memory.CopyFrom(memory)
        if end.out_of_memory and exit.reason == "WorkerFailed" and was_killed(exit):
            exit.reason = "OutOfMemory"
            exit.message = f"{exit.message}; the node used more memory than its limit: ask for more".lstrip("; ")
        return exit

    def exit_without_record(self, end: NodeEnd, last_lines: Sequence[str] = ()) -> common_pb2.Exit:
        """Why a node ended whose agent left no exit record.

        Args:
            last_lines: of its agent or its workers.
        """
        node = self.nodes[end.node]
        if node.told is not None:
            return self.explained(end.node, node.told, end.cause)
        exit = common_pb2.Exit(
            node=end.node, last_lines=last_lines, resumed_from=node.resumed_from, progressed=node.progressed
        )
        if (memory := _memory(node, end)) is not None:
            exit.memory.CopyFrom(memory)
        if node.forced is not None:
            exit.MergeFrom(node.forced)
            return exit
        if end.out_of_memory:
            exit.reason, exit.message = "OutOfMemory", "the node used more memory than its limit: ask for more"
        elif self.stop_reason and self.first_failure is None:
            exit.reason = _REASON_OF_STOP.get(self.stop_reason, STOPPED)
            exit.message = f"ended while it was being stopped ({self.stop_reason})"
        elif end.cause is not None:
            exit.MergeFrom(end.cause)
        else:
            exit.reason = "AgentLost"
            exit.message = "the agent of the node ended without an exit record; its last lines are in agent.log"
        return exit

    def note_progress(self, progress: common_pb2.Progress) -> bool:
        """Keeps the furthest progress of all nodes; whether it is news."""
        if self.progress is not None and _distance(progress) <= _distance(self.progress):
            return False
        self.progress = progress
        return True

    def watch(self) -> asyncio.Event:
        """An event that is set whenever something here has changed; give it back to `unwatch`."""
        event = asyncio.Event()
        if self.watchers is None:
            self.watchers = set()
        self.watchers.add(event)
        return event

    def unwatch(self, event: asyncio.Event) -> None:
        """Ends a `watch`."""
        if self.watchers is not None:
            self.watchers.discard(event)

    def changed(self) -> None:
        """Wakes everyone who watches."""
        for event in self.watchers or ():
            event.set()


def _memory(node: Node, end: NodeEnd) -> common_pb2.MemoryUse | None:
    """What the backend knows of a node's memory, and where that is only the limit, the peak of the heartbeats."""
    if end.memory is None:
        return common_pb2.MemoryUse(peak_bytes=node.resident_peak, sampled=True) if node.resident_peak else None
    memory = common_pb2.MemoryUse()
    memory.CopyFrom(end.memory)
    if not memory.peak_bytes:
        memory.peak_bytes, memory.sampled = node.resident_peak, True
    return memory


def _name_failure(exit: common_pb2.Exit) -> None:
    """A node that was stopped because a peer had failed, after its own worker had raised: that worker has failed."""
    if exit.reason == STOPPED and exit.HasField("exception") and not exit.lost_peer:
        raised = ": ".join(filter(None, (exit.exception.type, exit.exception.message)))
        exit.reason, exit.message = "WorkerFailed", f"rank {exit.first_failing_rank} raised {raised}"


def _explains(node: Node) -> tuple[bool, bool, int]:
    exit = node.exit
    assert exit is not None
    return exit.reason == STOPPED, exit.lost_peer, node.failed_ns


def _distance(progress: common_pb2.Progress) -> tuple[int, int]:
    return progress.step, progress.updated_ns
