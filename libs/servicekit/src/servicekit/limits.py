"""How often a caller may call, and how many streams may be open.

The bounds are far above what a well-behaved client needs; they keep a script in a tight loop from taking the yard away
from everybody else. Each service counts on its own, so that a flood of questions never delays what launchers report.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
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


@dataclass(frozen=True, slots=True)
class Streams:
    """How many streams of one method may be open: of one caller, and in all."""

    of_caller: int
    in_all: int


# All users hold one token, and all nodes of an attempt hold one.
READS = Streams(512, 1024)
"""Of a method that answers one request with a stream. One whose client stands still holds a message, or two."""
EXCHANGES = Streams(4096, 16384)
"""Of a method with a stream in both directions: every agent keeps some open."""
STREAMS_BY_METHOD: Mapping[str, Streams] = MappingProxyType(
    {
        # Their messages are large: 1 MiB.
        "GetChunks": Streams(128, 256),
        "ReadFile": Streams(128, 256),
        # They remember what they sent: up to some MB.
        "WatchSeries": Streams(128, 256),
        # They keep files from being removed, and read everything.
        "Backup": Streams(2, 2),
        "Verify": Streams(2, 2),
        "Shell": Streams(256, 256),
    }
)
"""Methods with limits of their own."""


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


class StreamLimiter:
    """Counts open streams by caller and method.

    Args:
        limits: by method's name, in place of `READS` and `EXCHANGES`.
    """

    def __init__(self, limits: Mapping[str, Streams] = STREAMS_BY_METHOD) -> None:
        self._limits = limits
        self._of_caller: Counter[tuple[str, str, str]] = Counter()
        self._in_all: Counter[str] = Counter()

    def open(self, principal: Principal, method: str, *, exchange: bool) -> OpenStream:
        """Counts a stream until it is closed.

        Args:
            method: as gRPC names it: `/package.Service/Method`.
            exchange: whether the request is a stream as well.

        Raises:
            ResourceExhausted: TooManyStreams.
        """
        name = method.rpartition("/")[2]
        limit = self._limits.get(name, EXCHANGES if exchange else READS)
        caller = (principal.kind, principal.attempt_id, method)
        if self._of_caller[caller] >= limit.of_caller:
            raise _too_many_streams(f"{_name_of(principal)} has {limit.of_caller:,} streams of {name} open")
        if self._in_all[method] >= limit.in_all:
            raise _too_many_streams(f"{limit.in_all:,} streams of {name} are open")
        self._of_caller[caller] += 1
        self._in_all[method] += 1
        return OpenStream(lambda: self._closed(caller, method))

    def _closed(self, caller: tuple[str, str, str], method: str) -> None:
        self._in_all[method] -= 1
        self._of_caller[caller] -= 1
        if not self._of_caller[caller]:
            del self._of_caller[caller]


class OpenStream:
    """A stream that is counted.

    Args:
        on_close: called once, when it is closed.
    """

    def __init__(self, on_close: Callable[[], None] = lambda: None) -> None:
        self._on_close: Callable[[], None] | None = on_close

    def take_over(self) -> OpenStream:
        """The same stream, for another who closes it; closing this one does nothing from now on."""
        on_close, self._on_close = self._on_close, None
        return OpenStream(on_close or (lambda: None))

    def close(self) -> None:
        """The stream counts no more."""
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()


def _too_many_streams(what: str) -> ResourceExhausted:
    return ResourceExhausted(
        f"{what}: no more are served at a time", reason="TooManyStreams", hint="end some of them, or try again later"
    )


def _name_of(principal: Principal) -> str:
    return f"attempt {principal.attempt_id}" if principal.attempt_id else "the holder of the yard's token"


def _too_many(principal: Principal, service: str, rate: Rate, wait_s: float) -> ResourceExhausted:
    return ResourceExhausted(
        f"{_name_of(principal)} calls {service} more often than {rate.per_s:g} times a second",
        reason="TooManyCalls",
        hint=f"call again in {wait_s:.3f} s; watch instead of asking again and again, and send many things in one call",
        fields={"retry_after_s": f"{wait_s:.3f}"},
    )
