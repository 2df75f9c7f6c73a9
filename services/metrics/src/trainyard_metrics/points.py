"""Decoded points of runs, kept for further queries as long as there is room."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from trainyard_metrics.domain.columns import Columns, empty, join
from trainyard_metrics.runlogs import RunLogs
from trainyard_metrics.storage.snapshot import Snapshot


@dataclass
class RunPoints:
    """All points of one run."""

    columns: Columns = field(default_factory=empty)
    positions: Mapping[str, int] = field(default_factory=dict)  # what of each writer is decoded
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class PointCache:
    """Points by run. Only what came since the last query is decoded."""

    def __init__(self, logs: RunLogs, max_points: int) -> None:
        self._logs = logs
        self._max_points = max_points
        self._runs: OrderedDict[str, RunPoints] = OrderedDict()

    async def load(self, run_id: str) -> RunPoints:
        """Every durable point of a run.

        Raises:
            DataLoss: its file is damaged.
        """
        found = self._runs.setdefault(run_id, RunPoints())
        self._runs.move_to_end(run_id)
        async with found.lock, self._logs.use(run_id) as log:
            await asyncio.to_thread(_extend, found, log.snapshot())
        self._evict(run_id)
        return found

    def forget(self, run_id: str) -> None:
        """Drops a deleted run."""
        self._runs.pop(run_id, None)

    def _evict(self, keep: str) -> None:
        total = sum(len(run.columns) for run in self._runs.values())
        while total > self._max_points and next(iter(self._runs)) != keep:
            _, dropped = self._runs.popitem(last=False)
            total -= len(dropped.columns)


def _extend(run: RunPoints, snapshot: Snapshot) -> None:
    fresh = snapshot.points(after=run.positions)
    run.columns = join([run.columns, fresh]) if len(fresh) else run.columns
    run.positions = snapshot.positions
