"""Which run is to be compacted next, and when."""

from __future__ import annotations

from collections import OrderedDict

_FIRST_RETRY_S = 5.0
_LAST_RETRY_S = 600.0


class Schedule:
    """Runs that are ready, runs that wait to be quiet, runs that failed and wait to be tried again.

    Has no clock of its own: `now` is seconds on any clock that does not go back.
    """

    def __init__(self, quiet_s: float) -> None:
        self._quiet_s = quiet_s
        self._ready: OrderedDict[str, None] = OrderedDict()
        self._written: OrderedDict[str, float] = OrderedDict()  # by the time of the last record
        self._failed: dict[str, tuple[float, float]] = {}  # when to try again, and the delay that was

    def written(self, run_id: str, now: float) -> None:
        """The run got records."""
        self._written[run_id] = now
        self._written.move_to_end(run_id)

    def ready(self, run_id: str) -> None:
        """The run has something to be compacted. One that failed waits all the same."""
        if run_id not in self._failed:
            self._ready[run_id] = None

    def failed(self, run_id: str, now: float) -> None:
        """It did not work: to be tried again, later each time."""
        _, delay = self._failed.get(run_id, (0.0, _FIRST_RETRY_S / 2))
        delay = min(2 * delay, _LAST_RETRY_S)
        self._ready.pop(run_id, None)
        self._failed[run_id] = (now + delay, delay)

    def done(self, run_id: str) -> None:
        """It worked."""
        self._failed.pop(run_id, None)

    def forget(self, run_id: str) -> None:
        """The run is gone."""
        for runs in (self._ready, self._written, self._failed):
            runs.pop(run_id, None)

    def take(self, now: float) -> str | None:
        """A run to be compacted now."""
        if self._ready:
            return self._ready.popitem(last=False)[0]
        for run_id, (due, _) in self._failed.items():
            if due <= now:
                self._failed[run_id] = (float("inf"), self._failed[run_id][1])
                return run_id
        if self._written and next(iter(self._written.values())) + self._quiet_s <= now:
            return self._written.popitem(last=False)[0]
        return None

    def due(self) -> float:
        """When `take` has something, if nothing happens before: infinity for never."""
        times = [due for due, _ in self._failed.values()]
        times += [written + self._quiet_s for written in list(self._written.values())[:1]]
        return min(times, default=float("inf"))

    @property
    def waiting(self) -> int:
        """Runs that are ready, or failed."""
        return len(self._ready) + len(self._failed)
