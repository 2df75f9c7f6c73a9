import pytest
from hypothesis import given
from hypothesis import strategies as st
from servicekit.auth import Principal
from servicekit.errors import ResourceExhausted
from servicekit.limits import CallLimiter, Rate

USER = Principal("user")


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def admitted(limiter, principal=USER, service="YardService"):
    try:
        limiter.admit(principal, service)
    except ResourceExhausted:
        return False
    return True


def test_a_burst_is_admitted_and_what_is_beyond_it_comes_back_with_time():
    clock = Clock()
    limiter = CallLimiter({"user": Rate(per_s=10, burst=5)}, clock)
    assert [admitted(limiter) for _ in range(6)] == [True] * 5 + [False]
    clock.now = 0.1
    assert [admitted(limiter) for _ in range(2)] == [True, False]
    clock.now = 1000
    assert [admitted(limiter) for _ in range(6)] == [True] * 5 + [False]


def test_the_time_to_wait_is_enough():
    clock = Clock()
    limiter = CallLimiter({"user": Rate(per_s=4, burst=1)}, clock)
    limiter.admit(USER, "YardService")
    with pytest.raises(ResourceExhausted) as refused:
        limiter.admit(USER, "YardService")
    clock.now = float(refused.value.fields["retry_after_s"])
    assert admitted(limiter)


def test_attempts_users_and_services_do_not_spend_each_others_calls():
    limiter = CallLimiter({"user": Rate(1, 1), "attempt": Rate(1, 1)}, Clock())
    callers = [USER, Principal("attempt", "default", "job", "one", 1), Principal("attempt", "default", "job", "two", 2)]
    every = [(caller, service) for caller in callers for service in ("MetricsService", "ArtifactService")]
    assert all(admitted(limiter, *each) for each in every)
    assert not any(admitted(limiter, *each) for each in every)


@given(st.lists(st.floats(0, 2), max_size=60), st.integers(1, 8), st.floats(0.5, 20))
def test_never_more_than_the_burst_and_the_rate_allow(pauses, burst, per_s):
    clock = Clock()
    limiter = CallLimiter({"user": Rate(per_s, burst)}, clock)
    count = 0
    for pause in pauses:
        clock.now += pause
        count += admitted(limiter)
        assert count <= burst + clock.now * per_s + 1e-6
