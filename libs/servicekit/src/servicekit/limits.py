"""How often a caller may call: a token bucket for every caller and service.

The bounds are far above what a well-behaved client needs; they keep a script in a tight loop from taking the yard away
from everybody else. Each service counts on its own, so that a flood of questions never delays what launchers report.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from servicekit.auth import Principal
from servicekit.errors import ResourceExhausted

_REMEMBERED = 10_000


@dataclass(frozen=True, slots=True)
class Rate:
    """Calls a second that go on forever, and how many may come at once."""

    per_s: float
    burst: int


DEFAULT_RATES: Mapping[str, Rate] = MappingProxyType({"user": Rate(1000, 5000), "attempt": Rate(200, 1000)})
"""By kind of principal. A stream counts as one call: what travels in it is bounded by flow control."""


class CallLimiter:
    """Counts calls by caller and service.

    Args:
        rates: by kind of principal; a kind without one is not limited.
        clock: seconds that only grow.
    """

    def __init__(self, rates: Mapping[str, Rate] = DEFAULT_RATES, clock: Callable[[], float] = time.monotonic) -> None:
        self._rates = rates
        self._clock = clock
        self._buckets: OrderedDict[tuple[str, str, str], tuple[float, float]] = OrderedDict()  # calls left, when

    def admit(self, principal: Principal, service: str) -> None:
        """Counts one call.

        Raises:
            ResourceExhausted: TooManyCalls; `retry_after_s` says when the next one is admitted.
        """
        rate = self._rates.get(principal.kind)
        if rate is None:
            return
        key = (principal.kind, principal.attempt_id, service)
        now = self._clock()
        left, since = self._buckets.pop(key, (float(rate.burst), now))
        left = min(float(rate.burst), left + (now - since) * rate.per_s)
        self._buckets[key] = (left - 1 if left >= 1 else left, now)
        if len(self._buckets) > _REMEMBERED:
            self._buckets.popitem(last=False)
        if left < 1:
            raise _too_many(principal, service, rate, (1 - left) / rate.per_s)


def _too_many(principal: Principal, service: str, rate: Rate, wait_s: float) -> ResourceExhausted:
    who = f"attempt {principal.attempt_id}" if principal.kind == "attempt" else "the holder of the yard's token"
    return ResourceExhausted(
        f"{who} calls {service} more often than {rate.per_s:g} times a second",
        reason="TooManyCalls",
        hint=f"call again in {wait_s:.3f} s; watch instead of asking again and again, and send many things in one call",
        fields={"retry_after_s": f"{wait_s:.3f}"},
    )
