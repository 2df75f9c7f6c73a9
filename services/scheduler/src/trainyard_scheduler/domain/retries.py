"""What follows the end of an attempt: the one place where that is decided.

Order of evidence: an accepted cancel, a deadline, the exit itself. Order among failures: the first matching rule,
reasons that cannot get better, the budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from trainyard_scheduler.domain.reasons import (
    CANNOT_GET_BETTER,
    NOT_CHARGED,
    NOT_THE_JOBS_FAULT,
    RETRY_LIMIT,
    ExitReason,
    StopReason,
)

FREE_RETRIES_MAX = 10
BACKOFF_MAX_S = 300.0


class Action(StrEnum):
    """What a rule of `spec.retries.rules` asks for."""

    RETRY = "retry"
    RETRY_FREE = "retryFree"
    FAIL = "fail"


class Outcome(StrEnum):
    """Where a job goes when its attempt is over."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    RETRY = "retry"
    BACK_TO_QUEUE = "back to queue"  # no retry: nothing of the attempt ran


@dataclass(frozen=True, slots=True)
class Rule:
    """Every condition that is given must hold."""

    action: Action
    exit_codes: frozenset[int] = frozenset()
    signals: frozenset[str] = frozenset()
    reasons: frozenset[str] = frozenset()
    log_pattern: str = ""

    def matches(self, index: int, end: Ending) -> bool:
        """Whether this rule, number `index` in the spec, applies. Log patterns are matched by the agent."""
        return (
            (not self.exit_codes or end.exit_code in self.exit_codes)
            and (not self.signals or end.signal in self.signals)
            and (not self.reasons or end.reason in self.reasons)
            and (not self.log_pattern or end.matched_rule == index)
        )


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """`spec.retries`, resolved."""

    limit: int = 0
    backoff_s: float = 0.0
    rules: Sequence[Rule] = field(default=())


@dataclass(frozen=True, slots=True)
class Ending:
    """What is known of how an attempt ended."""

    reason: str
    message: str = ""
    exit_code: int | None = None
    signal: str = ""
    matched_rule: int | None = None
    acknowledged: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do with the job."""

    outcome: Outcome
    reason: str
    message: str
    free: bool = False  # a retry that does not spend the budget
    delay_s: float = 0.0  # before the next attempt may start


def decide(
    end: Ending, stop: StopReason, policy: RetryPolicy, retries_used: int, free_used: int, cancel_message: str = ""
) -> Verdict:
    """What follows an attempt that ended so.

    Args:
        end: how it ended.
        stop: why the scheduler had asked it to stop, if it had.
        policy: of the job.
        retries_used: retries that have spent the budget so far.
        free_used: retries that have not.
        cancel_message: what the user gave as the reason of a cancel.
    """
    if stop is StopReason.CANCELLED:
        return Verdict(Outcome.CANCELLED, StopReason.CANCELLED, cancel_message)
    if stop is StopReason.DEADLINE_EXCEEDED:
        return Verdict(
            Outcome.FAILED, ExitReason.DEADLINE_EXCEEDED, "was still running at its deadline (spec.deadline)"
        )
    if end.reason == ExitReason.COMPLETED and end.acknowledged:
        return Verdict(Outcome.SUCCEEDED, ExitReason.COMPLETED, end.message)
    return _after_failure(end, policy, retries_used, free_used)


def _after_failure(end: Ending, policy: RetryPolicy, retries_used: int, free_used: int) -> Verdict:
    reason = ExitReason.OUTPUTS_NOT_STORED if end.reason == ExitReason.COMPLETED else end.reason
    index, rule = next(((i, rule) for i, rule in enumerate(policy.rules) if rule.matches(i, end)), (-1, None))
    because = f"{reason}: {end.message}" if end.message else reason
    if rule is not None:
        because = f"{because}; rule {index} of spec.retries.rules says {rule.action}"
    if rule is not None and rule.action is Action.FAIL:
        return Verdict(Outcome.FAILED, reason, because)
    if rule is None and reason in CANNOT_GET_BETTER:
        return Verdict(Outcome.FAILED, reason, f"{because}; running it again cannot change that")
    if rule is None and reason in NOT_CHARGED:
        return Verdict(Outcome.BACK_TO_QUEUE, reason, f"{because}; back in its place in the queue, not a retry")
    delay_s = backoff_s(policy.backoff_s, retries_used + free_used)
    free = rule.action is Action.RETRY_FREE if rule is not None else reason in NOT_THE_JOBS_FAULT
    if free and free_used < FREE_RETRIES_MAX:
        return Verdict(
            Outcome.RETRY, reason, f"{because}; free retry {free_used + 1} of {FREE_RETRIES_MAX}", True, delay_s
        )
    if retries_used < policy.limit:
        return Verdict(Outcome.RETRY, reason, f"{because}; retry {retries_used + 1} of {policy.limit}", delay_s=delay_s)
    if policy.limit or free:
        return Verdict(Outcome.FAILED, RETRY_LIMIT, f"{because}; all {policy.limit} retries are used")
    return Verdict(Outcome.FAILED, reason, because)


def backoff_s(first_s: float, retries_so_far: int) -> float:
    """Doubles with every retry, up to five minutes."""
    return min(first_s * 2.0 ** min(retries_so_far, 32), BACKOFF_MAX_S)
