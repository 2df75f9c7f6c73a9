"""SchedulerService: what users call."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
from servicekit.auth import require_operator, require_user, require_workspace
from servicekit.errors import InvalidArgument, NotFound, ServiceError, Unavailable
from servicekit.events import caller
from servicekit.paging import decode_token, encode_token, page_size
from servicekit.store import Store
from sqlmodel import Session
from trainyard.spec import TrainingJob
from trainyard_protos.v1 import scheduler_pb2, scheduler_pb2_grpc

from trainyard_scheduler import queries, references, views
from trainyard_scheduler.documents import Resolved, require_allowed, resolve_for_plan
from trainyard_scheduler.explain import explain
from trainyard_scheduler.index import Index
from trainyard_scheduler.ledger import Ledger
from trainyard_scheduler.settings import Settings
from trainyard_scheduler.submissions import Submitter
from trainyard_scheduler.tables import Attempt, Event, Job
from trainyard_scheduler.transitions import steer
from trainyard_scheduler.watch import EVERYTHING, EventHub

WORKSPACES = frozenset({"default"})
_WATCH_BATCH = 500
_MESSAGE_MAX = 4096

_Context = grpc.aio.ServicerContext[Any, Any]


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Turns calls into queries and transitions."""

    def __init__(self, store: Store, ledger: Ledger, index: Index, hub: EventHub, settings: Settings) -> None:
        self._store = store
        self._ledger = ledger
        self._index = index
        self._hub = hub
        self._settings = settings
        self._submitter = Submitter(ledger, index, settings)

    async def Submit(self, request: scheduler_pb2.SubmitRequest, context: _Context) -> scheduler_pb2.SubmitResponse:
        _workspace(request.workspace)
        _require_may_vouch([request])
        outcome = (await self._submitter.submit([request]))[0]
        if isinstance(outcome, ServiceError):
            raise outcome
        if outcome.created:
            spec = outcome.spec
        else:
            spec = await self._store.read(lambda session: queries.spec_of(session, outcome.job.id))
        return scheduler_pb2.SubmitResponse(job=views.job(outcome.job, self._index, spec), created=outcome.created)

    async def SubmitBatch(
        self, request: scheduler_pb2.SubmitBatchRequest, context: _Context
    ) -> scheduler_pb2.SubmitBatchResponse:
        require_user()
        if len(request.requests) > self._settings.max_batch:
            raise InvalidArgument(
                f"a batch of {len(request.requests)}; at most {self._settings.max_batch} are allowed",
                reason="BatchTooLarge",
                hint="send several batches",
            )
        for entry in request.requests:
            _workspace(entry.workspace)
        _require_may_vouch(request.requests)
        response = scheduler_pb2.SubmitBatchResponse()
        for outcome in await self._submitter.submit(request.requests):
            result = response.results.add()
            if isinstance(outcome, ServiceError):
                result.code = outcome.code.value[0]
                result.message = outcome.message
                result.reason = outcome.reason
                result.hint = outcome.hint
                result.problems.problems.extend(outcome.problems)
            else:
                result.submitted.job.CopyFrom(views.job(outcome.job, self._index))
                result.submitted.created = outcome.created
        return response

    async def Plan(self, request: scheduler_pb2.PlanRequest, context: _Context) -> scheduler_pb2.PlanResponse:
        _workspace(request.workspace)
        document, limit = request.document, self._settings.max_document_bytes
        resolved, text = await asyncio.to_thread(_resolve_as_yaml, document.text, document.filename, limit)
        require_allowed(resolved.kubernetes, document.filename, self._index.allowed_pods())
        ahead = self._index.jobs_ahead(resolved.priority, _YOUNGEST)
        machines = self._index.fits_empty(resolved.demand)
        return scheduler_pb2.PlanResponse(
            resolved=text,
            pending=views.pending(self._index.would_wait(resolved.demand, ahead)),
            placements=views.placements(machines),
            position=ahead + 1 if machines else 0,
            jobs_ahead=ahead,
        )

    async def GetJob(self, request: scheduler_pb2.GetJobRequest, context: _Context) -> scheduler_pb2.Job:
        workspace = _workspace(request.workspace)

        def query(session: Session) -> tuple[Job, str, list[Attempt]]:
            job = queries.find_job(session, references.resolve_job_id(session, workspace, request.id))
            return job, queries.spec_of(session, job.id), queries.attempts_of(session, job.id)

        job, spec, attempts = await self._store.read(query)
        return views.job(job, self._index, spec, attempts)

    async def ListJobs(
        self, request: scheduler_pb2.ListJobsRequest, context: _Context
    ) -> scheduler_pb2.ListJobsResponse:
        wanted = queries.JobFilter(
            workspace=_workspace(request.workspace),
            states=tuple(request.states),
            queue=request.queue,
            name_contains=request.name_contains,
            labels=dict(request.labels),
            owner_kind=request.owner.kind,
            owner_id=request.owner.id,
            include_owned=request.include_owned,
            before_id=decode_token(request.page_token),
        )
        size = page_size(request.page_size, default=100, most=1000)
        jobs = await self._store.read(lambda session: queries.list_jobs(session, wanted, size + 1))
        more = encode_token(jobs[size - 1].id) if len(jobs) > size else ""
        return scheduler_pb2.ListJobsResponse(
            jobs=[views.job(job, self._index) for job in jobs[:size]], next_page_token=more
        )

    async def CancelJob(self, request: scheduler_pb2.CancelJobRequest, context: _Context) -> scheduler_pb2.Job:
        workspace = _workspace(request.workspace)
        if len(request.message) > _MESSAGE_MAX:
            raise InvalidArgument(
                f"message has {len(request.message)} characters; at most {_MESSAGE_MAX} are allowed", reason="TooLong"
            )
        job_id = await self._job_id(workspace, request.id, live=True)
        job = await self._ledger.write(functools.partial(steer.cancel, job_id=job_id, message=request.message))
        return views.job(job, self._index)

    async def DeleteJob(
        self, request: scheduler_pb2.DeleteJobRequest, context: _Context
    ) -> scheduler_pb2.DeleteJobResponse:
        workspace = _workspace(request.workspace)

        def query(session: Session) -> tuple[Job | None, list[str]]:
            try:
                job_id = references.resolve_job_id(session, workspace, request.id, single=True)
            except NotFound:
                if not queries.is_being_removed(session, request.id):
                    raise
                return None, []
            return queries.find_job(session, job_id), queries.used_artifacts(session.connection(), workspace)

        job, used = await self._store.read(query)
        if job is None:
            return scheduler_pb2.DeleteJobResponse(job=scheduler_pb2.Job(id=request.id, workspace=workspace))
        steer.require_ended(job)
        if not request.dry_run:
            delete = functools.partial(steer.delete, job_id=job.id, actor=caller(context))
            await self._ledger.write(delete)
        return scheduler_pb2.DeleteJobResponse(job=views.job(job, self._index), used_references=used)

    async def RetryJob(self, request: scheduler_pb2.RetryJobRequest, context: _Context) -> scheduler_pb2.Job:
        job_id = await self._job_id(_workspace(request.workspace), request.id)
        self._submitter.require_room(1)
        job = await self._ledger.write(functools.partial(steer.retry, job_id=job_id))
        return views.job(job, self._index)

    async def ListEvents(
        self, request: scheduler_pb2.ListEventsRequest, context: _Context
    ) -> scheduler_pb2.ListEventsResponse:
        workspace = _workspace(request.workspace)
        size = page_size(request.page_size, default=500, most=5000)
        job_id = await self._job_id(workspace, request.job) if request.job else ""
        events = await self._events(workspace, job_id, request.after_seq, size)
        return scheduler_pb2.ListEventsResponse(events=[views.event(event) for event in events])

    async def Watch(self, request: scheduler_pb2.WatchRequest, context: _Context) -> AsyncIterator[scheduler_pb2.Event]:
        workspace = _workspace(request.workspace)
        job_id = await self._job_id(workspace, request.job) if request.job else EVERYTHING
        cursor = self._hub.newest_seq if request.from_now else request.after_seq
        with self._hub.subscribe(job_id) as wake:
            await context.send_initial_metadata(())
            while True:
                wake.clear()  # before the read: an event that is committed after it wakes the next round
                newest_seq = self._hub.newest_seq
                events = await self._events_after(workspace, job_id, cursor)
                for event in events:
                    cursor = event.seq
                    yield views.event(event)
                if self._hub.closed:
                    raise Unavailable(
                        "the scheduler stops", reason="ShuttingDown", hint="watch again from the last event's number"
                    )
                if len(events) < _WATCH_BATCH:
                    cursor = max(cursor, newest_seq)  # the others until then are of no interest here
                    await wake.wait()

    async def ExplainJob(
        self, request: scheduler_pb2.ExplainJobRequest, context: _Context
    ) -> scheduler_pb2.Explanation:
        workspace = _workspace(request.workspace)
        job_id = await self._job_id(workspace, request.id)
        job, attempts = await self._store.read(
            lambda session: (queries.find_job(session, job_id), queries.attempts_of(session, job_id))
        )
        return explain(job, attempts, self._index)

    async def ListPools(
        self, request: scheduler_pb2.ListPoolsRequest, context: _Context
    ) -> scheduler_pb2.ListPoolsResponse:
        _workspace(request.workspace)
        return scheduler_pb2.ListPoolsResponse(pools=[views.pool(pool) for pool in self._index.pools.values()])

    async def _job_id(self, workspace: str, reference: str, *, live: bool = False) -> str:
        return await self._store.read(
            lambda session: references.resolve_job_id(session, workspace, reference, live=live)
        )

    async def _events_after(self, workspace: str, object_id: str, after_seq: int) -> list[Event]:
        """For a watcher, which is mostly told of what has just happened."""
        newest = self._hub.after(after_seq)
        if newest is None:
            return await self._events(workspace, object_id, after_seq, _WATCH_BATCH)
        visible = (event for event in newest if event.workspace in (workspace, ""))
        return [event for event in visible if object_id in (EVERYTHING, event.object_id)]

    async def _events(self, workspace: str, object_id: str, after_seq: int, limit: int) -> list[Event]:
        return await self._store.read(
            lambda session: queries.list_events(session, workspace, object_id, after_seq, limit)
        )


_YOUNGEST = "\uffff"  # sorts after every id


def _workspace(name: str) -> str:
    """The workspace of a user's call.

    Raises:
        PermissionDenied: the caller is no user, or may not use it.
        NotFound: there is none of that name.
    """
    require_user()
    workspace = require_workspace(name)
    if workspace not in WORKSPACES:
        raise NotFound(
            f"there is no workspace '{workspace}'",
            reason="WorkspaceNotFound",
            hint=f"there is: {', '.join(sorted(WORKSPACES))}",
        )
    return workspace


def _require_may_vouch(requests: Sequence[scheduler_pb2.SubmitRequest]) -> None:
    """Raises:
    PermissionDenied: a caller other than the operator says that the Secrets of a document were checked."""
    if any(request.secrets_checked for request in requests):
        require_operator("secrets_checked")


def _resolve_as_yaml(text: str, filename: str, max_bytes: int) -> tuple[Resolved, str]:
    resolved = resolve_for_plan(text, filename, max_bytes)
    return resolved, TrainingJob.from_json(resolved.spec, stored=True).to_yaml()
