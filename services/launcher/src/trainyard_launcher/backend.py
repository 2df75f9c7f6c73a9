"""What the launcher needs of a place where nodes run.

A backend starts the agents of an attempt, says when one has ended, and ends it when told to. It knows nothing of jobs,
gangs, retries or the scheduler; the launcher knows nothing of processes or pods.

Laws:
- `start` is idempotent: a node that was ever started is not started again; if it is over, its end is delivered (again).
- When `start` fails, nothing of the attempt runs.
- Every node that was started ends in exactly one `NodeEnd` per life of the backend, told to the observer given to
  `open` or in the `Found` it returns; when it is delivered, nothing of the node runs any more. Of a machine that is
  lost nobody can know that: there the attempt's fence keeps what may go on from having any effect.
- Nothing ends because the backend object does: `close` leaves nodes running.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from trainyard_protos.v1 import common_pb2, launcher_pb2, scheduler_pb2
from trainyard_protos.v1.admin_pb2 import GetUsageResponse

if TYPE_CHECKING:
    from trainyard.spec import Spec


@dataclass(frozen=True, slots=True)
class Facts:
    """What must be known of an attempt for as long as anything of it exists."""

    workspace: str
    job_id: str
    job_name: str
    attempt_id: str
    fence: int
    nodes: int
    workers_per_node: int
    grace_s: float
    deadline_ns: int = 0  # 0: none
    # Earlier versions did not say these: an attempt that one of them began is still the same attempt.
    outputs: bool = field(default=True, compare=False)  # whether the job declares any
    database_id: str = field(default="", compare=False)  # of the scheduler's database that has the job
    machines: tuple[str, ...] = field(
        default=(), compare=False
    )  # by node, as planned; "" for one that does not exist yet
    kinds: tuple[str, ...] = field(default=(), compare=False)  # by node, of such machines; "" for one that exists


@dataclass(frozen=True, slots=True)
class Launch:
    """An attempt to start: one plan per node, in which the backend fills in what only it knows (addresses, devices).

    Plans are stored; `secrets`, variables of the workers, must reach the agents without being written anywhere. `spec`
    has what plans do not: image, volumes and the like. `labels` and `annotations` are the job's own. `secrets_checked`
    says that whoever wrote the job may read the Secrets of the cluster that it names.
    """

    facts: Facts
    plans: Sequence[launcher_pb2.NodePlan]
    per_worker: common_pb2.Resources
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    spec: Spec | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    secrets_checked: bool = False

    @property
    def threads(self) -> int:
        """How many threads a worker that is alone on its node has cores for; 0 when there are several."""
        return max(1, round(self.per_worker.cpu * 1000) // 1000) if self.facts.workers_per_node == 1 else 0


@dataclass(frozen=True, slots=True)
class NodeEnd:
    """A node that is over: its exit record, or None when its agent left none.

    `cause` is what the backend itself knows of the end, for instance that the pod was evicted: it explains an agent
    that left no record, or one that says no more than that it was told to stop. With `presumed` it is what the backend
    takes for the cause of an end that was not requested here. `memory` is what the backend knows of the node's memory.
    """

    attempt_id: str
    node: int
    exit: common_pb2.Exit | None
    out_of_memory: bool = False
    memory: common_pb2.MemoryUse | None = None
    cause: common_pb2.Exit | None = None
    presumed: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    """An attempt of an earlier life of the launcher: the nodes that are over, and those that were never started.

    `remark`, reason and text, is for the job's events.
    """

    facts: Facts
    ends: Sequence[NodeEnd] = ()
    unstarted: Sequence[int] = ()
    remark: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Where a node is, and what keeps it from running, if anything does."""

    machine: str
    folder: str = ""
    gpus: Sequence[int] = ()
    reason: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class Joined:
    """What an agent gets that had to ask for it."""

    plan: launcher_pb2.NodePlan
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class ShellRequest:
    """An interactive command beside a worker.

    Args:
        command: empty for the user's shell.
        worker_pid: the worker whose folder and environment it gets; 0 when the worker is not known to run.
        rows: of the terminal, with `tty`.
        columns: of the terminal, with `tty`.
    """

    command: Sequence[str]
    worker_pid: int
    tty: bool
    rows: int = 24
    columns: int = 80


class Shell(Protocol):
    """A running shell. `close` ends it and everything it started."""

    def output(self) -> AsyncIterator[bytes]: ...

    async def write(self, data: bytes) -> None: ...

    async def close_stdin(self) -> None: ...

    def resize(self, rows: int, columns: int) -> None: ...

    async def wait(self) -> int: ...

    async def close(self) -> None: ...


class Observer(Protocol):
    """Whom a backend tells what it sees, and asks what only those know who talk to the agents. On the loop's thread."""

    def ended(self, end: NodeEnd) -> None:
        """A node is over."""
        ...

    def remark(self, attempt_id: str, reason: str, text: str) -> None:
        """Something for the job's events that is no end, for instance that a pod finds no place."""
        ...

    async def delivered(self, facts: Facts) -> None:
        """Tells metrics that no writer's records of an attempt that is over are to be delivered any more.

        Raises:
            grpc.aio.AioRpcError: metrics did not hear it.
        """
        ...

    async def delivery_token(self, facts: Facts, undelivered: Sequence[str]) -> str:
        """Tells metrics which writers' records of an attempt that is over are still to be delivered, and makes the
        token with which it takes them.

        Raises:
            grpc.aio.AioRpcError: metrics did not hear it.
        """
        ...

    def placed(self, attempt_id: str) -> None:
        """A node of an attempt got its machine; `Backend.place` says which. Its agent is waited for from now on."""
        ...

    def silent_s(self, attempt_id: str, node: int) -> float:
        """For how long a node's agent has said nothing; before its first word, since the launcher waits for it. A
        launcher that begins anew has heard nobody yet, which is nobody's silence."""
        ...


class Backend(Protocol):
    """A place where nodes run."""

    @property
    def keeps_records(self) -> bool:
        """Whether records that metrics lacks at a node's end are kept. Else they are lost."""
        ...

    def offer(self) -> scheduler_pb2.RegisterPoolRequest:
        """What there is to run on, as a registration says it; without pool and lease."""
        ...

    async def changed(self) -> None:
        """Returns when machines came, went, or take pods differently than before: that is announced at once."""
        ...

    async def open(self, observer: Observer) -> Sequence[Found]:
        """Takes over what an earlier life left."""
        ...

    async def start(self, launch: Launch) -> str:
        """Starts the nodes that were never started. Returns a remark for the job's events, or "".

        Raises:
            StartError: a node cannot be started here.
        """
        ...

    async def join(self, attempt_id: str, node: int, credential: str, claim: Claim) -> Joined:
        """What the agent of a node has to do, for a backend whose agents have to ask.

        Args:
            credential: what the agent shows for itself.
            claim: makes the launch again, for a backend that has forgotten it.

        Raises:
            JoinRefused: the credential is not that of this node.
            JoinLater: that cannot be known now.
        """
        ...

    async def stop(self, attempt_id: str, node: int, *, kill: bool) -> None:
        """Asks a node's agent to end, or ends all of the node at once.

        A node that was never started ends by it, and never starts; nothing happens when it is over.
        """
        ...

    async def logs(self, attempt_id: str, node: int) -> Sequence[str]:
        """The last lines, at most 20, that the node's agent itself wrote: why it could not begin, for instance. Where
        it wrote none, those of its workers."""
        ...

    def place(self, attempt_id: str, node: int) -> Place:
        """Where a node is."""
        ...

    def awaits_machines(self, attempt_id: str) -> bool:
        """Whether not all nodes of an attempt have a machine yet: until then no agent begins, and none is silent."""
        ...

    async def shell(self, attempt_id: str, node: int, request: ShellRequest) -> Shell:
        """A shell beside a worker.

        Raises:
            StartError: the command cannot be started.
        """
        ...

    async def undelivered(self, attempt_id: str) -> Sequence[str]:
        """The writers of an attempt that is over whose records metrics lacks, as metrics knows them, and which can be
        delivered from here."""
        ...

    async def settle(self, attempt_id: str) -> None:
        """The attempt's end is known to the scheduler and to every service: never find it again."""
        ...

    async def held(self) -> Sequence[Facts]:
        """The attempts that are over and of which something is kept."""
        ...

    async def usage(self, job_ids: Collection[str] = ()) -> GetUsageResponse:
        """What is kept of attempts, running ones included, by job; what is not counted, and why.

        Args:
            job_ids: only of these jobs; empty: of all.
        """
        ...

    async def forget(self, attempt_ids: Sequence[str]) -> AbstractSet[str]:
        """Removes all that is kept of attempts that are over. Returns those of which nothing is left."""
        ...

    async def close(self) -> None:
        """Stops watching; nodes go on."""
        ...


Claim = Callable[[], Awaitable[Launch]]


class StartError(Exception):
    """Something cannot be started here; the message says why and what to do.

    Attributes:
        reason: as in `Exit.reason`.
    """

    def __init__(self, message: str, reason: str = "StartFailed") -> None:
        super().__init__(message)
        self.reason = reason


class JoinRefused(Exception):
    """Who asked is not the agent of that node."""


class JoinLater(Exception):
    """Who asked may be the agent of that node, which cannot be known now."""
