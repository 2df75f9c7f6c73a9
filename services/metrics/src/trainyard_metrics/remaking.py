"""Summaries made anew, from the points that count of a run and the attempts before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from servicekit.store import Store

from trainyard_metrics import runs, visible
from trainyard_metrics.domain.stitch import Attempt
from trainyard_metrics.domain.summary import Summary
from trainyard_metrics.reading import Reader
from trainyard_metrics.runs import Facts


class Remaker:
    """Reads points and summarises them."""

    def __init__(self, store: Store, reader: Reader) -> None:
        self._store = store
        self._reader = reader

    async def __call__(self, run: Facts, begin: Callable[[], None]) -> Summary:
        """The summary of a job's series up to a run.

        Args:
            begin: called in the event loop at the moment of the run's own snapshot.

        Raises:
            DataLoss: records are damaged.
            NotFound: the run was removed.
        """
        attempts = await self._attempts(run)
        earlier = [attempt.run_id for attempt in attempts if attempt.run_id != run.id]
        snapshots = {**await self._reader.snapshots(earlier), run.id: await self._reader.snapshot(run.id, begin)}
        return await self._reader.run(lambda: visible.summarise(visible.stitched(attempts, snapshots)))

    async def _attempts(self, run: Facts) -> Sequence[Attempt]:
        if not run.job_id:
            return [Attempt(run.id, run.fence)]
        rows = await self._store.read(lambda session: runs.of_job(session, run.workspace, run.job_id))
        return [runs.attempt(row) for row in rows if row.fence < run.fence or row.id == run.id]
