"""What happened since this process began to decide; Prometheus computes rates of it, and minds restarts itself."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from trainyard_scheduler.domain.reasons import EventType, ExitReason, StopReason
from trainyard_scheduler.domain.states import JobState

OTHER = "Other"
REASONS = (*dict.fromkeys(map(str, (*ExitReason, StopReason.CANCELLED, EventType.POOL_LOST))), OTHER)
"""Why attempts end. Launchers may know more words: a label that others choose must have a bound."""


class EndedAttempt(NamedTuple):
    """What ended attempts are counted by; `ran`: whether its workers were ever running."""

    pool: str
    reason: str
    ran: bool


class Tally:
    """Counts that only grow."""

    def __init__(self) -> None:
        self.admissions = 0
        self.jobs: Counter[JobState] = Counter()
        self.attempts: Counter[EndedAttempt] = Counter()

    def attempt_ended(self, pool: str, reason: str, ran: bool) -> None:
        """An attempt is over."""
        self.attempts[EndedAttempt(pool, reason if reason in REASONS else OTHER, ran)] += 1
