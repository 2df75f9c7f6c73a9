"""What a yard's services answer to an operator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainyard_protos.v1 import admin_pb2 as pb
from trainyard_protos.v1 import scheduler_pb2


@dataclass(frozen=True, slots=True)
class ServiceUsage:
    """What one service stores.

    Attributes:
        usage: by kind and workspace.
        free_bytes: of the disk it stores on; 0 when not known (an object store).
    """

    service: str
    usage: Sequence[pb.GetUsageResponse.Usage]
    free_bytes: int
    unread: Sequence[str] = ()
    """What is not counted, and why."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of what a removal frees.

    Attributes:
        what: "attempt folders", "logs", "metrics", "checkpoints".
        bytes: on disk.
        count: of `unit`.
    """

    what: str
    bytes: int
    count: int = 0
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Kept:
    """Something that a removal leaves, and why."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Removal:
    """What the removal of a job, or of runs, frees and leaves.

    Attributes:
        kind: "job" or "run".
        name: as references name it.
        frees: by kind; checkpoints free the disk with the next collection of the artifact store.
        keeps: artifacts of the job that stay.
        unread: what of it is not counted, and why.
    """

    kind: str
    name: str
    id: str
    frees: Sequence[Part]
    keeps: Sequence[Kept] = ()
    unread: Sequence[str] = ()

    @property
    def bytes(self) -> int:
        """All that it frees."""
        return sum(part.bytes for part in self.frees)


@dataclass(frozen=True, slots=True)
class ServiceEvent:
    """An event, and the service that keeps it: `event.seq` counts within that."""

    service: str
    event: scheduler_pb2.Event


@dataclass(frozen=True, slots=True)
class Verified:
    """How far the check of a service is, and what it found there.

    Attributes:
        checked, total: things looked at so far, and in all.
        finding: None while there is only progress.
    """

    service: str
    checked: int
    total: int
    finding: pb.VerifyResponse.Finding | None


@dataclass(frozen=True, slots=True)
class Maintained:
    """What tidying up did in one service.

    Attributes:
        done: in words.
    """

    service: str
    freed_bytes: int
    done: Sequence[str]


@dataclass(frozen=True, slots=True)
class BackedUp:
    """How far a backup is.

    Attributes:
        path: of the file that is being written, below the folder of the backup.
        files, bytes: so far.
    """

    service: str
    path: str
    files: int
    bytes: int
