"""Typed reasons: stable words for programs; the sentences beside them are for people."""

from __future__ import annotations

from enum import StrEnum


class ExitReason(StrEnum):
    """Why an attempt ended, as `Exit.reason` in common.proto."""

    COMPLETED = "Completed"
    WORKER_FAILED = "WorkerFailed"
    OUT_OF_MEMORY = "OutOfMemory"
    HUNG = "Hung"
    STOPPED = "Stopped"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    AGENT_LOST = "AgentLost"
    AGENT_SILENT = "AgentSilent"
    START_FAILED = "StartFailed"
    CODE_UNAVAILABLE = "CodeUnavailable"
    ENVIRONMENT_FAILED = "EnvironmentFailed"
    INPUT_UNAVAILABLE = "InputUnavailable"
    SECRET_UNAVAILABLE = "SecretUnavailable"
    OUTPUTS_NOT_STORED = "OutputsNotStored"
    IMAGE_UNAVAILABLE = "ImageUnavailable"
    VOLUME_UNAVAILABLE = "VolumeUnavailable"
    UNSCHEDULABLE = "Unschedulable"
    PODS_REFUSED = "PodsRefused"
    NOT_ALLOWED = "NotAllowed"
    EVICTED = "Evicted"
    NODE_LOST = "NodeLost"
    POD_DELETED = "PodDeleted"


# Running the same job again cannot change these.
CANNOT_GET_BETTER = frozenset(
    {
        ExitReason.STOPPED,
        ExitReason.CODE_UNAVAILABLE,
        ExitReason.INPUT_UNAVAILABLE,
        ExitReason.SECRET_UNAVAILABLE,
        ExitReason.NOT_ALLOWED,
    }
)


# A cluster took the job's machines away: that spends no retry of the job's.
NOT_THE_JOBS_FAULT = frozenset({ExitReason.EVICTED, ExitReason.NODE_LOST, ExitReason.POD_DELETED})


# The cluster took none of it: it goes back to its place in the queue, and that counts as no retry at all.
NOT_CHARGED = frozenset({ExitReason.UNSCHEDULABLE})


class PendingReason(StrEnum):
    """Why a queued job is not running, as `Pending.reason` in scheduler.proto."""

    NEVER_FITS = "NeverFits"
    ROOM_HELD_BY_OTHERS = "RoomHeldByOthers"
    WAITING_FOR_CAPACITY = "WaitingForCapacity"
    WAITING_FOR_MACHINES = "WaitingForMachines"
    BEHIND_OTHERS = "BehindOthers"
    BACKOFF = "Backoff"
    NO_POOL = "NoPool"
    NO_YARD = "NoYard"
    NONE = ""


class StopReason(StrEnum):
    """Why the scheduler asked a running attempt to stop."""

    CANCELLED = "Cancelled"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    NONE = ""


class EventType(StrEnum):
    """What happened, as `Event.type` in scheduler.proto."""

    SUBMITTED = "Submitted"
    ADMITTED = "Admitted"
    CLAIMED = "Claimed"
    RUNNING = "Running"
    STOPPING = "Stopping"
    FINALIZING = "Finalizing"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    CANCELLED = "Cancelled"
    REQUEUED = "Requeued"
    RETRIED_BY_USER = "RetriedByUser"
    NOTE = "Note"
    POOL_REGISTERED = "PoolRegistered"
    POOL_LOST = "PoolLost"


RETRY_LIMIT = "RetryLimit"
