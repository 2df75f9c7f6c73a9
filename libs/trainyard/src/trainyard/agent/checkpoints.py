"""Checkpoints of any script: stored while it trains, verified, and put back for the next attempt."""

from __future__ import annotations

import asyncio
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from trainyard_protos.v1 import artifacts_pb2, metrics_pb2

from trainyard.agent import courtesy
from trainyard.agent.candidates import Candidate, Candidates, check_checkpoint
from trainyard.agent.changes import Changes
from trainyard.agent.confinement import OutsideJob
from trainyard.agent.formats import changed_ns, is_sharded
from trainyard.agent.local_copies import LocalCopies
from trainyard.agent.plan import Checkpoints, Plan
from trainyard.agent.store import Refused, Store
from trainyard.agent.tracked import Cut, Tracked
from trainyard.copies import complete_ns

Note = Callable[[str, str], None]
Positions = Mapping[str, int]
# Workers of two nodes that train together are apart by less than that, and so are the clocks of the nodes.
NODES_APART_NS = 10 * 10**9


def artifact_name(job_id: str) -> str:
    """The artifact whose versions are a job's checkpoints."""
    return f"checkpoints-{job_id}"


@dataclass(frozen=True, slots=True)
class Waiting:
    """A checkpoint that is to be stored, and where this node's own writers end in it."""

    candidate: Candidate
    info: artifacts_pb2.CheckpointInfo
    positions: Positions


class CheckpointSync:
    """Uploads checkpoints in the order they appear.

    A version is there only when metrics has all rows in front of its cut: whoever resumes from it goes on with a series
    that has no gap, whatever becomes of this machine.

    Attributes:
        appeared: how many were found.
        failures: what could not be stored, in words.
    """

    def __init__(
        self,
        plan: Plan,
        wanted: Checkpoints,
        folder: Path,
        root: Path,
        store: Store,
        tracked: Tracked,
        rows_stored: Callable[[Positions], Awaitable[None]],
        *,
        earlier_cut: dict[str, int],
        workers_run: bool,
        changes: Changes,
        note: Note,
        heard: Callable[[], None],
    ) -> None:
        """
        Args:
            folder: the node's, which has the record of copies.
            root: the job's folder, which checkpoints never come from outside of.
            rows_stored: returns once metrics has all rows in front of a cut, or takes no more.
            earlier_cut: the cut of the checkpoint this attempt resumed from: where earlier attempts' writers end.
            workers_run: the workers already run, so that what is in the folder is theirs.
            heard: called when a checkpoint appeared: a sign of life.
        """
        self._plan = plan
        self._wanted = wanted
        self._root = root
        self._folder = root / wanted.path
        self._store = store
        self._tracked = tracked
        self._rows_stored = rows_stored
        self._earlier_cut = earlier_cut
        self._note = note
        self._heard = heard
        self._pending: deque[Waiting] = deque()
        self._wake = asyncio.Event()
        self._finishing = False
        self.appeared = 0
        self.failures: list[str] = []
        self.copies = LocalCopies(plan, folder, root, store, self._uploading, self._removed)
        self.candidates = Candidates(
            self._folder, wanted.pattern, wanted.settle_s, self._found, self._failed, changes, root=root
        )
        if workers_run:
            self.candidates.look_at_all()
        else:
            self.candidates.ignore_present()

    def _found(self, candidate: Candidate) -> None:
        self.appeared += 1
        self._heard()
        if self._plan.node > 0 and not is_sharded(candidate.path):
            # Whole, so node 0 has the same, and stores it.
            self.copies.add(candidate.path, candidate.signature, complete_ns(candidate.path), candidate.step)
            self._wake.set()
            return
        try:
            # The cut is taken now: what the script logs while the upload waits is not part of this checkpoint.
            self._pending.append(self._waiting(candidate))
        except Exception as error:
            self._failed(candidate.path.name, error)
        self._wake.set()

    def _failed(self, name: str, error: Exception) -> None:
        """One checkpoint is not stored; training and later checkpoints go on."""
        from trainyard.artifacts import ArtifactError

        if not isinstance(error, Refused | ArtifactError | OutsideJob | OSError):
            traceback.print_exception(error)  # a defect: to the agent's log
        words = str(error) or type(error).__name__
        self.failures.append(f"checkpoint '{name}': {words}")
        self._note("CheckpointNotStored", f"'{name}' was not stored: {words}")

    def _waiting(self, candidate: Candidate) -> Waiting:
        cut = self._tracked.cut(changed_ns(candidate.signature), candidate.step)
        info = artifacts_pb2.CheckpointInfo(
            step=candidate.step,
            cut={**self._earlier_cut, **cut.positions},
            metrics=cut.values,
            keep_last=self._wanted.keep_last,
            best_metric=self._wanted.best_metric,
            best_mode=self._wanted.best_mode,
            elsewhere=self._elsewhere(candidate, cut),
        )
        return Waiting(candidate, info, cut.positions)

    def _elsewhere(self, candidate: Candidate, cut: Cut) -> metrics_pb2.Elsewhere | None:
        """Where writers of other nodes end, of whom this one knows nothing; None where each node tells of its own.

        Nodes train in step with each other, so the step tells; the time bounds rows whose steps count something else.
        """
        if self._plan.nodes == 1 or is_sharded(candidate.path):
            return None
        until_ns = changed_ns(candidate.signature) + NODES_APART_NS
        return metrics_pb2.Elsewhere(step=cut.step, until_ns=until_ns, ranks=sorted({*self._plan.ranks, *cut.ranks}))

    async def run(self) -> None:
        """Uploads until `finish` was called and nothing is pending."""
        look = asyncio.Event()
        removing = asyncio.create_task(self._remove_dropped(look))
        try:
            while True:
                self._wake.clear()
                while self._pending:
                    await self._upload(self._pending[0])
                    self._pending.popleft()
                if self._finishing:
                    return  # no copy is worth a longer end: those that are left go when the attempt is over
                look.set()
                await self._wake.wait()
        finally:
            removing.cancel()
            await self.copies.finish()

    def _uploading(self) -> set[Path]:
        return {waiting.candidate.path for waiting in self._pending}

    def _removed(self, name: str) -> None:
        self.candidates.forget(name)

    async def _remove_dropped(self, look: asyncio.Event) -> None:
        """Removes copies of dropped checkpoints whenever something was stored. No upload waits for that."""
        while True:
            await look.wait()
            look.clear()
            try:
                await self.copies.remove_dropped()
            except Exception as error:
                if not isinstance(error, Refused):
                    traceback.print_exception(error)  # a defect: to the agent's log
                print(f"copies of dropped checkpoints stay: {error}", flush=True)  # noqa: T201 (the agent's log)

    def finish(self) -> None:
        """Looks for last checkpoints; `run` ends when they are stored."""
        for name in self.candidates.finish():
            self._note(
                "CheckpointIncomplete", f"'{self._wanted.path}/{name}' is no whole checkpoint and was not stored"
            )
        self._finishing = True
        self._wake.set()

    @property
    def unstored(self) -> list[str]:
        """Checkpoints that are not stored (yet), in words."""
        return [*self.failures, *(f"checkpoint '{each.candidate.path.name}'" for each in self._pending)]

    async def _upload(self, waiting: Waiting) -> None:
        name = waiting.candidate.path.name
        courtesy.yield_to_workers()
        try:
            of = waiting.candidate
            before_ns = complete_ns(of.path)
            version = await self._store.call(lambda stub: self._send(stub, waiting))
            self.copies.add(of.path, of.signature, before_ns, of.step, version.id if version is not None else "")
        except FileNotFoundError:
            self._note("CheckpointGone", f"'{name}' was deleted before it was stored")
        except Exception as error:
            self._failed(name, error)

    async def _send(self, stub: object, waiting: Waiting) -> artifacts_pb2.Version | None:
        from trainyard.artifacts import FRUGAL, upload, upload_part

        plan, candidate, name = self._plan, waiting.candidate, waiting.candidate.path.name
        paths = [Path(path) for path, _, _ in candidate.signature]
        version = f"{changed_ns(candidate.signature)}"
        check_checkpoint(self._root, candidate.path)

        async def before_commit() -> None:
            check_checkpoint(self._root, candidate.path)  # the workers run: it may have been replaced meanwhile
            await self._rows_stored(waiting.positions)

        if plan.nodes > 1 and is_sharded(candidate.path):
            return await upload_part(
                stub,  # type: ignore[arg-type]
                self._folder,
                paths,
                part=plan.node,
                parts=plan.nodes,
                workspace=self._store.workspace,
                name=artifact_name(plan.job_id),
                kind="checkpoint",
                idempotency_key=f"{plan.attempt_id}/{name}",
                producer=self._store.producer,
                checkpoint=waiting.info,
                before_commit=before_commit,
                pace=FRUGAL,
            )
        return await upload(
            stub,  # type: ignore[arg-type]
            self._folder,
            paths,
            workspace=self._store.workspace,
            name=artifact_name(plan.job_id),
            kind="checkpoint",
            idempotency_key=f"{plan.attempt_id}/{plan.node}/{name}/{version}",
            producer=self._store.producer,
            checkpoint=waiting.info,
            before_commit=before_commit,
            pace=FRUGAL,
        )
