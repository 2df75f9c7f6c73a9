"""What carries a node's products to the yard: lines and points, checkpoints, outputs."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from trainyard_protos.v1 import common_pb2

from trainyard.agent import run_record
from trainyard.agent.changes import Changes
from trainyard.agent.checkpoints import CheckpointSync
from trainyard.agent.facts import add_facts
from trainyard.agent.hang import Pulse
from trainyard.agent.journal import Journal
from trainyard.agent.link import Link
from trainyard.agent.parts import CHECKPOINTS, OUTPUTS, RECORDS, Parts
from trainyard.agent.plan import Plan
from trainyard.agent.prepare import Prepared, checkpoint_folder
from trainyard.agent.restore import FRESH, Restored
from trainyard.agent.rules import LogRules
from trainyard.agent.session import Session
from trainyard.agent.shipper import Shipper
from trainyard.agent.sources import LineSource, SampleSource, Source
from trainyard.agent.spool import Spool
from trainyard.agent.store import Store
from trainyard.agent.tracked import Tracked
from trainyard.agent.transfers import store_outputs
from trainyard.agent.verdict import StopOrder

# Output after this long is progress of a job that neither tracks nor checkpoints.
PROGRESS_BY_OUTPUT_S = 10.0
# A checkpoint is noticed within that time after its files last changed: so long rows stay on disk for its cut.
LATEST_CUT_S = 60.0


class Carriers:
    """Everything that talks to the yard, and what it talks about."""

    def __init__(self, folder: Path, plan: Plan, pulse: Pulse) -> None:
        self._folder = folder
        self._plan = plan
        self._pulse = pulse
        self._began_s = time.monotonic()
        self._output_late = False
        self._prepared: Prepared | None = None
        self._shipper: Shipper | None = None
        self._shipping: asyncio.Task[None] | None = None
        self._syncing: asyncio.Task[None] | None = None
        self.checkpoints: CheckpointSync | None = None
        self.link = Link.of(plan, folder)
        self.store = Store(plan, self.link, self._delayed)
        self.rules = LogRules(plan.log_rules)
        self.parts = Parts(self.note)
        self.changes = Changes(self.note)
        self.journal = Journal(Spool(folder / "spool"), plan.node)
        self.session = Session(plan, self.link, self.journal)
        self.tracked = Tracked(
            folder / "tracker",
            facts=self._take_facts,
            complain=lambda what: self.note("RowsDropped", what),
            cuts_within_s=LATEST_CUT_S if plan.checkpoints is not None else 0,
        )
        self.samples: dict[int, SampleSource] = {}
        self._lines = LineSource(f"{plan.attempt_id}/{plan.node}/lines", self.journal.spool)

    @property
    def restored(self) -> Restored:
        return self._prepared.restored if self._prepared else FRESH

    @property
    def progressed(self) -> bool:
        """Whether the attempt went beyond where it began."""
        if self.tracked.progress.updated_ns:
            return self.tracked.progress.step > self.restored.step
        if self._plan.checkpoints is not None:
            return self.checkpoints is not None and self.checkpoints.appeared > 0
        return self._output_late

    def begin(self, prepared: Prepared | None, *, workers_run: bool) -> None:
        """Starts carrying. `prepared` is None when the node failed before its workers could start."""
        if self._shipping is not None:
            return
        self._prepared = prepared
        complain = partial(self.note, "FactsRefused")
        self._run = run_record.describe(self._plan, prepared)
        self._keep_run()
        self._shipper = Shipper(self.link, self._run, self._sources, complain, self._delayed)
        self.journal.tell(self._shipper.wake)
        self._shipping = self.parts.run(RECORDS, self._shipper.run)
        if prepared is not None and checkpoint_folder(self._plan, prepared.root) is not None:
            assert self._plan.checkpoints is not None
            self.checkpoints = CheckpointSync(
                self._plan,
                self._plan.checkpoints,
                self._folder,
                prepared.root,
                self.store,
                self.tracked,
                self._rows_stored,
                earlier_cut=self.restored.cut,
                workers_run=workers_run,
                changes=self.changes,
                note=self.note,
                heard=self._pulse.beat,
            )
            if (restored := self.restored).version_id:
                self.checkpoints.copies.add(
                    Path(restored.path), restored.signature, restored.complete_ns, restored.step, restored.version_id
                )
            self._syncing = self.parts.run(CHECKPOINTS, self.checkpoints.run)

    def note(self, reason: str, text: str) -> None:
        """Something worth an event of the job, and a line of its log."""
        self.session.note(reason, text)
        self.journal.say(f"{reason}: {text}")

    def _delayed(self, why: str) -> None:
        self.note("StorageDelayed", f"{why}; training goes on, and what waits is kept on this machine")

    def output(self, rank: int, lines: list[str], place: bytes) -> None:
        """Lines of a worker, whose output is read up to `place`."""
        self._pulse.beat()
        self._output_late = time.monotonic() - self._began_s > PROGRESS_BY_OUTPUT_S
        self.rules.look(lines)
        self.journal.output(rank, lines, place)

    def look_at_trackers(self) -> None:
        """Takes in what the trackers wrote since the last look."""
        if self.tracked.look():
            self._pulse.beat()
            self.session.news()
            if self._shipper is not None:
                self._shipper.wake()

    def sample(self, rank: int, values: list[tuple[str, float]]) -> None:
        """A measurement of a worker by the agent."""
        if rank not in self.samples:
            prefix = f"{self._plan.attempt_id}/{self._plan.node}/system"
            self.samples[rank] = SampleSource(f"{prefix}/{rank}/{uuid.uuid4()}", rank)
        self.samples[rank].add(values, time.time_ns(), step=int(time.monotonic() - self._began_s))

    async def finish(
        self,
        exit: common_pb2.Exit,
        patience_s: float,
        stop: asyncio.Future[StopOrder],
        allowed_s: Callable[[StopOrder], float],
    ) -> list[str]:
        """Stores the rest within `patience_s`, and when a stop comes in within what is allowed for that; returns what
        is not stored, in words."""
        unstored: list[str] = []
        work = asyncio.ensure_future(self._store_rest(exit, unstored))
        awaited: list[asyncio.Future[Any]] = [work] if stop.done() else [work, stop]
        await asyncio.wait(awaited, timeout=patience_s, return_when="FIRST_COMPLETED")
        if not work.done():
            await asyncio.wait([work], timeout=min(patience_s, allowed_s(stop.result())) if stop.done() else 0)
        if not work.done():
            work.cancel()
            unstored += self.checkpoints.unstored if self.checkpoints else []
            unstored.append(f"{RECORDS}: not everything was acknowledged in time")
        else:
            work.result()
        for task in (self._shipping, self._syncing):
            if task is not None:
                task.cancel()
        self.changes.close()
        self.journal.spool.close()
        return list(dict.fromkeys(unstored))

    def count_unacknowledged(self, exit: common_pb2.Exit) -> None:
        """Notes how many lines and rows metrics does not have, as far as is known."""
        exit.unacknowledged_lines = max(0, self.journal.spool.next_seq - self._lines.acknowledged)
        exit.unacknowledged_rows = sum(log.unacknowledged for log in self.tracked.logs)

    async def _store_rest(self, exit: common_pb2.Exit, unstored: list[str]) -> None:
        """A part that fails takes no other with it."""
        with self.parts.guard(CHECKPOINTS):
            unstored += await self._store_checkpoints()
        with self.parts.guard(OUTPUTS):
            lacking: list[str] = []
            if exit.reason == "Completed" and self._prepared is not None and self._plan.node == 0:
                lacking = await self._store_outputs(self._prepared)
                unstored += lacking
            if self.checkpoints is not None and not lacking:
                self.checkpoints.copies.record_outputs()
        if self._shipper is not None and self._shipping is not None:
            await self._shipper.finish(self._shipping)
            if self._shipper.refused:
                unstored.append(f"{RECORDS}: {self._shipper.refused}")
            unstored += self._shipper.missing.values()
        unstored += self.parts.unstored

    async def _store_checkpoints(self) -> list[str]:
        if self.checkpoints is None or self._syncing is None:
            return []
        self.checkpoints.finish()
        await self._syncing
        return self.checkpoints.unstored

    async def _store_outputs(self, prepared: Prepared) -> list[str]:
        return await store_outputs(
            self._plan.outputs,
            prepared.root,
            self.store,
            attempt_id=self._plan.attempt_id,
            made_from=prepared.made_from,
            since_ns=prepared.ready_ns,
        )

    async def _rows_stored(self, cut: Mapping[str, int]) -> None:
        """Returns once metrics has all rows in front of a cut, or takes no more rows at all."""
        assert self._shipper is not None and self._shipping is not None
        stored = asyncio.ensure_future(self._shipper.stored(cut))
        try:
            await asyncio.wait([stored, self._shipping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stored.cancel()

    def _sources(self) -> Iterator[Source]:
        yield self._lines
        yield from self.tracked.sources
        yield from self.samples.values()

    def _take_facts(self, facts: dict[str, Any]) -> None:
        if self._shipper is not None:
            self._shipper.update(lambda run: add_facts(run, facts))
            self._keep_run()

    def _keep_run(self) -> None:
        try:
            run_record.keep(self._folder, self._run)
        except OSError as error:
            # Nobody needs it while this agent lives.
            print(f"{run_record.RUN_FILE} was not written: {error}", flush=True)  # noqa: T201 (the agent's log)
