"""States of jobs and attempts, and the moves between them that are allowed."""

from __future__ import annotations

from enum import IntEnum, StrEnum


class JobState(IntEnum):
    """As `JobState` in scheduler.proto."""

    QUEUED = 1
    STARTING = 2
    RUNNING = 3
    STOPPING = 4
    FINALIZING = 5
    SUCCEEDED = 6
    FAILED = 7
    CANCELLED = 8

    @property
    def ended(self) -> bool:
        """Whether only a user can bring the job back to life."""
        return self in ENDED


ENDED = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})
ACTIVE = frozenset({JobState.STARTING, JobState.RUNNING, JobState.STOPPING, JobState.FINALIZING})

_OVER = ENDED | {JobState.QUEUED}
_MOVES: dict[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset({JobState.STARTING, JobState.FAILED, JobState.CANCELLED}),
    JobState.STARTING: _OVER | {JobState.RUNNING, JobState.STOPPING, JobState.FINALIZING},
    JobState.RUNNING: _OVER | {JobState.STOPPING, JobState.FINALIZING},
    JobState.STOPPING: frozenset({JobState.FAILED, JobState.CANCELLED}),
    JobState.FINALIZING: _OVER | {JobState.STOPPING},
    JobState.SUCCEEDED: frozenset(),
    JobState.FAILED: frozenset({JobState.QUEUED}),
    JobState.CANCELLED: frozenset({JobState.QUEUED}),
}


def check_move(old: JobState, new: JobState) -> JobState:
    """Returns `new`.

    Raises:
        ValueError: a job never moves from `old` to `new`; whoever asks for it has a defect.
    """
    if new not in _MOVES[old]:
        raise ValueError(f"a job cannot move from {old.name.lower()} to {new.name.lower()}")
    return new


class AttemptState(StrEnum):
    """As `Attempt.state` in scheduler.proto."""

    CREATED = "created"
    CLAIMED = "claimed"
    RUNNING = "running"
    STOPPING = "stopping"
    FINALIZING = "finalizing"
    PUBLISHING = "publishing"  # it succeeded, and only its launcher's report of the end is missing
    ENDED = "ended"
