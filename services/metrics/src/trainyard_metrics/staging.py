"""What may follow what of a run: numbers without a hole, names within the limit, lines in the order of time."""

from __future__ import annotations

import logging

from servicekit.errors import OutOfRange, ResourceExhausted
from trainyard_protos.v1.metrics_pb2 import AppendRequest

from trainyard_metrics.counters import Counters
from trainyard_metrics.domain import batches
from trainyard_metrics.settings import Settings
from trainyard_metrics.storage.folder import State

logger = logging.getLogger(__name__)

_LONG_AGO = -(2**63)


class Staging:
    """A run as it will be once everything that was taken is durable."""

    def __init__(self, run_id: str, state: State, settings: Settings, counters: Counters) -> None:
        self._run_id = run_id
        self._state = state
        self._settings = settings
        self._counters = counters
        self._warned = False
        self.forget()

    def forget(self) -> None:
        """Nothing is under way any more: what is durable is all there is."""
        self._next = dict(self._state.positions)
        self._line_times = dict(self._state.line_times)
        self._names = set(self._state.names)

    def add(self, request: AppendRequest) -> bool:
        """Takes a batch, without the records that were taken before; returns whether anything of it is new.

        Raises:
            InvalidArgument: the batch contradicts itself.
            OutOfRange: records before it lack.
            ResourceExhausted: too many writers.
        """
        batches.check(request)
        expected = self._next.get(request.writer_id, 0)
        self._check_order(request, expected)
        known = min(batches.count(request), expected - request.first_seq)
        self._counters.skipped.inc(known)
        batches.skip(request, known)
        added = batches.count(request)
        if not added:
            return False
        self._refuse_names(request)
        self._order_lines(request)
        self._next[request.writer_id] = expected + added
        return True

    def _check_order(self, request: AppendRequest, expected: int) -> None:
        if request.first_seq > expected:
            self._counters.holes.inc()
            raise OutOfRange(
                f"writer {request.writer_id} of run {self._run_id} sent record {request.first_seq}; {expected} is next",
                reason="Hole",
                hint="go on with the expected number",
                fields={"expected": str(expected), "writer_id": request.writer_id, "run_id": self._run_id},
            )
        if request.writer_id not in self._next and len(self._next) >= self._settings.max_writers_per_run:
            raise ResourceExhausted(
                f"run {self._run_id} has {len(self._next):,} writers already",
                reason="TooManyWriters",
                hint="a writer is a process, not a call: keep one for the life of the process",
            )

    def _refuse_names(self, request: AppendRequest) -> None:
        refused = batches.refuse_names(request.rows, self._allow_name)
        if not refused:
            return
        self._counters.refused_points.inc(sum(refused.values()))
        if not self._warned:
            self._warned = True
            logger.warning(
                "series refused",
                extra={"run": self._run_id, "series": next(iter(refused))[:256], "names": len(self._names)},
            )

    def _allow_name(self, name: str) -> bool:
        if name in self._names:
            return True
        if len(self._names) >= self._settings.max_names_per_run or not batches.is_name(name):
            return False
        self._names.add(name)
        return True

    def _order_lines(self, request: AppendRequest) -> None:
        # A clock that was set back must not put a line before the one it follows.
        if not request.HasField("lines"):
            return
        latest = self._line_times.get(request.writer_id, _LONG_AGO)
        for line in request.lines.lines:
            if line.time_ns < latest:
                line.time_ns = latest
            latest = line.time_ns
        self._line_times[request.writer_id] = latest
