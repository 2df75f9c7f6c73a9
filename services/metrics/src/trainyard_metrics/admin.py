"""The methods of `MetricsAdminService`: what an operator asks. Users only."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
from servicekit.auth import require_user
from servicekit.backup import recorded
from servicekit.errors import NotFound
from servicekit.events import AdminEvent, EventLog, Recorder, Subject, caller
from servicekit.store import Store
from servicekit.usage import Usage, database_bytes, free_bytes
from servicekit.verify import acknowledge_loss, database_findings, is_gone
from sqlalchemy import func
from sqlmodel import Session, col, select
from trainyard_protos.v1 import admin_pb2 as pb
from trainyard_protos.v1.admin_pb2_grpc import MetricsAdminServiceServicer

from trainyard_metrics.backups import Backups
from trainyard_metrics.removal import SERVICE
from trainyard_metrics.retention import Retention
from trainyard_metrics.storage.files import Damaged
from trainyard_metrics.storage.usage import Size
from trainyard_metrics.summaries import Summaries
from trainyard_metrics.tables import RunRow
from trainyard_metrics.upkeep import Upkeep

_PROGRESS_EVERY = 50

Context = grpc.aio.ServicerContext[Any, Any]
Finding = pb.VerifyResponse.Finding


class MetricsAdminServicer(MetricsAdminServiceServicer):
    """Usage, verification, maintenance and backups of runs."""

    def __init__(
        self,
        store: Store,
        upkeep: Upkeep,
        retention: Retention,
        backups: Backups,
        summaries: Summaries,
        home: Path,
        events: EventLog,
    ) -> None:
        self._events = events
        self._store = store
        self._upkeep = upkeep
        self._retention = retention
        self._backups = backups
        self._summaries = summaries
        self._home = home

    async def GetUsage(self, request: pb.GetUsageRequest, context: Context) -> pb.GetUsageResponse:
        require_user()
        files = await self._upkeep.usage()
        usage = [
            *await self._store.read(lambda session: [*_of_database(session), self._events.usage(session)]),
            _of_files("journals", files.journals),
            _of_files("columns", files.columns),
            _of_files("other files of runs", files.other),
        ]
        return pb.GetUsageResponse(usage=usage, free_bytes=free_bytes(self._home))

    async def Verify(self, request: pb.VerifyRequest, context: Context) -> AsyncIterator[pb.VerifyResponse]:
        require_user()
        repair = Recorder(self._events, caller(context)) if request.repair else None
        acknowledge = None if repair is None else functools.partial(acknowledge_loss, self._store, repair, SERVICE)
        for problem in await database_findings(self._store, acknowledge=acknowledge):
            yield pb.VerifyResponse(finding=problem)
        if is_gone(self._store):
            return
        run_ids = await self._upkeep.run_ids()
        if unknown := await self._unknown(run_ids):
            yield pb.VerifyResponse(total=len(run_ids), finding=_of_unknown(unknown))
        for checked, run_id in enumerate(run_ids, start=1):
            async for finding in self._check(run_id, repair):
                yield pb.VerifyResponse(checked=checked, total=len(run_ids), finding=finding)
            if checked % _PROGRESS_EVERY == 0 or checked == len(run_ids):
                yield pb.VerifyResponse(checked=checked, total=len(run_ids))

    async def Maintain(self, request: pb.MaintainRequest, context: Context) -> pb.MaintainResponse:
        require_user()
        before = await self._bytes()
        recorder = Recorder(self._events, caller(context))
        retained = await self._retention.apply(recorder)
        compacted = await self._upkeep.maintain()
        counts = {
            "removed {} old runs of plain processes": retained.runs,
            "removed the logs of {} old runs": retained.logs,
            "compacted {} runs": compacted.runs,
        }
        done = [words.format(f"{count:,}") for words, count in counts.items() if count]
        freed = max(0, before - await self._bytes())
        if done:
            await self._record(recorder, AdminEvent.MAINTAINED, SERVICE, f"{freed:,} bytes freed; {'; '.join(done)}")
        done += [f"failed: {what}" for what in (*retained.failed, *compacted.failed)]
        return pb.MaintainResponse(freed_bytes=freed, done=done)

    async def Backup(self, request: pb.BackupRequest, context: Context) -> AsyncIterator[pb.BackupResponse]:
        require_user()
        recorder = Recorder(self._events, caller(context))

        async def record(type: AdminEvent, message: str) -> None:
            await self._record(recorder, type, SERVICE, message)

        async for piece in recorded(self._store.engine, self._backups.stream(), record):
            yield piece

    async def ListAdminEvents(self, request: pb.ListAdminEventsRequest, context: Context) -> pb.ListAdminEventsResponse:
        return await self._events.page(self._store, request)

    async def _record(self, recorder: Recorder, type: AdminEvent, about: Subject, message: str) -> None:
        await self._store.write(lambda session: recorder.record(session, type, about, message))

    async def _check(self, run_id: str, repair: Recorder | None) -> AsyncIterator[Finding]:
        try:
            found = [damage async for damage in self._upkeep.verify(run_id)]
        except NotFound:
            return  # it was removed meanwhile
        if not (found and repair):
            for damage in found:
                yield _finding(run_id, damage)
            return
        # Files cannot change in a transaction of the database: their repair is recorded before it begins.
        about = await self._run(run_id)
        await self._record(repair, AdminEvent.REPAIR_STARTED, about, "; ".join(_finding(run_id, d).what for d in found))
        for repaired in await self._upkeep.repair(run_id):
            what = f"run {run_id}, {repaired.path.name}: {repaired.what}"
            await self._record(repair, AdminEvent.REPAIRED, about, f"{what} -> lost: {repaired.lost or 'nothing'}")
            hint = "the damaged file lies beside the new one, under a name that begins with damaged-"
            yield Finding(what=what, hint=hint, repaired=True, lost=repaired.lost)
        await self._summaries.make_anew(run_id)

    async def _run(self, run_id: str) -> Subject:
        row = await self._store.read(lambda session: session.get(RunRow, run_id))
        return Subject("Run", row.name, row.id, row.workspace) if row is not None else Subject("Run", "", run_id)

    async def _unknown(self, run_ids: Sequence[str]) -> list[str]:
        """Those of the runs with files that the database does not know."""
        known = set(await self._store.read(lambda session: session.exec(select(RunRow.id)).all()))
        # A removal takes the files first and the row last; a run gets files after its row.
        still_there = set(await self._upkeep.run_ids())
        return [run_id for run_id in run_ids if run_id in still_there - known]

    async def _bytes(self) -> int:
        files = await self._upkeep.usage()
        return files.journals.bytes + files.columns.bytes + files.other.bytes


def _finding(run_id: str, damage: Damaged) -> Finding:
    return Finding(
        what=f"run {run_id}, {damage.path.name} at byte {damage.offset:,}: {damage.what}",
        hint="restore the file from a backup, or save what is left with `yard admin verify --repair`",
    )


def _of_unknown(run_ids: Sequence[str]) -> Finding:
    some = ", ".join(run_ids[:3]) + (", ..." if len(run_ids) > 3 else "")
    return Finding(
        what=f"the database does not know {len(run_ids):,} of the runs that have files: {some}",
        hint="put the database back from a backup: their records are whole unless another line says otherwise",
        lost="their names, params, specs, tags and notes, and the way to them",
    )


def _of_database(session: Session) -> list[Usage]:
    runs = session.exec(select(RunRow.workspace, func.count()).group_by(col(RunRow.workspace))).all()
    return [
        Usage(what="database", bytes=database_bytes(session)),
        *(Usage(what="runs", workspace=workspace, count=count, unit="runs") for workspace, count in sorted(runs)),
    ]


def _of_files(what: str, size: Size) -> Usage:
    return Usage(what=what, bytes=size.bytes, count=size.files, unit="files")
