"""What follows an attempt's end, as rules without a database."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainyard_scheduler.domain.reasons import StopReason
from trainyard_scheduler.domain.retries import (
    BACKOFF_MAX_S,
    FREE_RETRIES_MAX,
    Action,
    Ending,
    Outcome,
    RetryPolicy,
    Rule,
    backoff_s,
    decide,
)

NO_STOP = StopReason.NONE
FAILURE = Ending("WorkerFailed", exit_code=1)
DONE = Ending("Completed", exit_code=0, acknowledged=True)


def outcome(end: Ending = FAILURE, *rules: Rule, limit: int = 0, used: int = 0, free: int = 0) -> tuple[Outcome, str]:
    verdict = decide(end, NO_STOP, RetryPolicy(limit, 1.0, rules), used, free)
    return verdict.outcome, verdict.reason


def test_a_completed_and_acknowledged_attempt_succeeds() -> None:
    assert outcome(DONE) == (Outcome.SUCCEEDED, "Completed")


def test_a_completed_attempt_whose_outputs_are_not_acknowledged_fails() -> None:
    assert outcome(Ending("Completed", exit_code=0)) == (Outcome.FAILED, "OutputsNotStored")


@pytest.mark.parametrize("end", [DONE, FAILURE, Ending("Stopped", signal="SIGTERM")])
def test_an_accepted_cancel_decides_whatever_the_exit(end: Ending) -> None:
    verdict = decide(end, StopReason.CANCELLED, RetryPolicy(9), 0, 0)
    assert verdict.outcome is Outcome.CANCELLED


def test_a_deadline_fails_without_a_retry() -> None:
    verdict = decide(Ending("Stopped"), StopReason.DEADLINE_EXCEEDED, RetryPolicy(9), 0, 0)
    assert (verdict.outcome, verdict.reason) == (Outcome.FAILED, "DeadlineExceeded")


def test_a_failure_without_a_budget_keeps_its_own_reason() -> None:
    assert outcome() == (Outcome.FAILED, "WorkerFailed")


def test_the_budget_is_spent_before_the_job_fails() -> None:
    assert outcome(limit=2, used=1)[0] is Outcome.RETRY
    assert outcome(limit=2, used=2) == (Outcome.FAILED, "RetryLimit")


@pytest.mark.parametrize("reason", ["CodeUnavailable", "InputUnavailable", "SecretUnavailable", "Stopped"])
def test_what_cannot_get_better_is_not_tried_again(reason: str) -> None:
    assert outcome(Ending(reason), limit=5) == (Outcome.FAILED, reason)


def test_a_rule_may_still_ask_to_try_what_cannot_get_better() -> None:
    rule = Rule(Action.RETRY, reasons=frozenset({"CodeUnavailable"}))
    assert outcome(Ending("CodeUnavailable"), rule, limit=1)[0] is Outcome.RETRY


def test_the_first_matching_rule_decides() -> None:
    never = Rule(Action.FAIL, exit_codes=frozenset({1}))
    free = Rule(Action.RETRY_FREE, exit_codes=frozenset({1, 143}))
    assert outcome(FAILURE, never, free, limit=3)[0] is Outcome.FAILED
    assert outcome(FAILURE, free, never, limit=3)[0] is Outcome.RETRY
    assert outcome(Ending("WorkerFailed", exit_code=143), never, free)[0] is Outcome.RETRY


def test_every_condition_of_a_rule_has_to_hold() -> None:
    rule = Rule(Action.RETRY_FREE, exit_codes=frozenset({1}), signals=frozenset({"SIGKILL"}))
    assert outcome(FAILURE, rule)[0] is Outcome.FAILED
    assert outcome(Ending("WorkerFailed", exit_code=1, signal="SIGKILL"), rule)[0] is Outcome.RETRY


def test_a_log_pattern_matches_only_when_the_agent_says_it_is_this_rule() -> None:
    rules = (Rule(Action.FAIL, exit_codes=frozenset({9})), Rule(Action.FAIL, log_pattern="CUDA out of memory"))
    assert outcome(Ending("WorkerFailed", matched_rule=1), *rules, limit=3)[0] is Outcome.FAILED
    assert outcome(Ending("WorkerFailed", matched_rule=0), *rules, limit=3)[0] is Outcome.RETRY
    assert outcome(Ending("WorkerFailed"), *rules, limit=3)[0] is Outcome.RETRY


def test_free_retries_do_not_spend_the_budget_until_their_cap() -> None:
    rule = Rule(Action.RETRY_FREE, reasons=frozenset({"WorkerFailed"}))
    policy = RetryPolicy(1, 0.0, (rule,))
    assert decide(FAILURE, NO_STOP, policy, 0, FREE_RETRIES_MAX - 1).free
    capped = decide(FAILURE, NO_STOP, policy, 0, FREE_RETRIES_MAX)
    assert (capped.outcome, capped.free) == (Outcome.RETRY, False)
    assert decide(FAILURE, NO_STOP, policy, 1, FREE_RETRIES_MAX).reason == "RetryLimit"


def test_backoff_doubles_up_to_five_minutes() -> None:
    assert [backoff_s(5, n) for n in range(4)] == [5, 10, 20, 40]
    assert backoff_s(5, 1000) == BACKOFF_MAX_S


endings = st.builds(
    Ending,
    st.sampled_from(["Completed", "WorkerFailed", "Hung", "Stopped", "AgentLost", "OutputsNotStored"]),
    exit_code=st.none() | st.integers(0, 255),
    signal=st.sampled_from(["", "SIGKILL", "SIGTERM"]),
    matched_rule=st.none() | st.integers(0, 3),
    acknowledged=st.booleans(),
)
rules = st.builds(
    Rule,
    st.sampled_from(Action),
    exit_codes=st.frozensets(st.integers(0, 255), max_size=2),
    log_pattern=st.sampled_from(["", "x"]),
)
policies = st.builds(RetryPolicy, st.integers(0, 5), st.floats(0, 300), st.tuples(rules, rules))


@given(end=endings, policy=policies)
def test_every_job_comes_to_an_end(end: Ending, policy: RetryPolicy) -> None:
    used = free = 0
    for _ in range(policy.limit + FREE_RETRIES_MAX + 1):
        verdict = decide(end, NO_STOP, policy, used, free)
        if verdict.outcome is not Outcome.RETRY:
            return
        assert 0 <= verdict.delay_s <= BACKOFF_MAX_S
        used, free = used + (not verdict.free), free + verdict.free
    raise AssertionError("retried beyond the budget and the cap")
