"""Calls about jobs: the scheduler's."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from uuid import uuid4

from trainyard_protos.v1 import scheduler_pb2 as pb

from trainyard import errors
from trainyard.client import states
from trainyard.client.connection import Connection, Outage
from trainyard.client.documents import Document, Source, document
from trainyard.client.names import job_reference
from trainyard.client.statuses import code_of, from_code

_ID_LENGTH = 36
BATCH = 500
"""Documents in one SubmitBatch call."""


class JobCalls:
    """What a client can ask about jobs.

    `job` is a reference, which the scheduler resolves: an id, a unique prefix of one, a name (its newest job; for a
    cancel its only job that has not ended), "digits#7" (the 7th job of that name), "@last" or "@-2" (the second
    newest).
    """

    _connection: Connection
    workspace: str

    async def submit_document(
        self, source: Source | Document, *, idempotency_key: str = "", owner: pb.Owner | None = None
    ) -> pb.SubmitResponse:
        """Submits, packing `code.path` when the document has one.

        Raises:
            InvalidSpec: the document is wrong; nothing was created.
            NotRunning: the yard cannot be reached.
        """
        doc = source if isinstance(source, Document) else document(source)
        return await self.send(submit_request(doc, self.workspace, idempotency_key, owner), doc)

    async def send(self, request: pb.SubmitRequest, source: Document) -> pb.SubmitResponse:
        """Sends a prepared request; the same idempotency key serves both tries when code has to be packed."""
        scheduler = self._connection.scheduler
        try:
            return await self._connection.call(scheduler.Submit, request)
        except errors.CodeNotPacked:
            request.packed_code = await self.pack(source)
            return await self._connection.call(scheduler.Submit, request)

    async def pack(self, source: Document) -> str:
        """Packs and stores the folder `code.path` of a document; returns the reference of that version.

        Raises:
            InvalidSpec: the document is wrong.
            InvalidArgument: the folder is missing, too large, or holds what cannot be stored.
        """
        from trainyard.client.code import pack

        return await pack(self._connection, source, self.workspace)

    async def submit_documents(self, sources: Iterable[Source]) -> AsyncIterator[pb.SubmitResponse | errors.YardError]:
        """Submits many; each is answered on its own, in order."""
        batch: list[tuple[pb.SubmitRequest, Document]] = []
        for source in sources:
            doc = document(source)
            batch.append((submit_request(doc, self.workspace), doc))
            if len(batch) == BATCH:
                for answer in await self._send_batch(batch):
                    yield answer
                batch = []
        if batch:
            for answer in await self._send_batch(batch):
                yield answer

    async def _send_batch(
        self, batch: Sequence[tuple[pb.SubmitRequest, Document]]
    ) -> list[pb.SubmitResponse | errors.YardError]:
        request = pb.SubmitBatchRequest(requests=[request for request, _ in batch])
        answer = await self._connection.call(self._connection.scheduler.SubmitBatch, request)
        return [await self._settle(result, *sent) for result, sent in zip(answer.results, batch, strict=True)]

    async def _settle(
        self, result: pb.SubmitBatchResponse.Result, request: pb.SubmitRequest, source: Document
    ) -> pb.SubmitResponse | errors.YardError:
        if not result.code:
            return result.submitted
        if result.reason == errors.CodeNotPacked.__name__:  # one by one
            try:
                return await self.send(request, source)
            except errors.YardError as error:
                return error
        problems = tuple(result.problems.problems)
        kind = from_code(code_of(result.code), has_problems=bool(problems))
        return kind(result.message, reason=result.reason, hint=result.hint, problems=problems)

    async def plan(self, source: Source | Document) -> pb.PlanResponse:
        """What submitting would do, without doing it: the resolved spec, where it fits, its place in the queue.

        Raises:
            InvalidSpec: the document is wrong.
        """
        doc = source if isinstance(source, Document) else document(source)
        request = pb.PlanRequest(workspace=self.workspace, document=doc.message())
        return await self._connection.call(self._connection.scheduler.Plan, request)

    async def get(self, job: str) -> pb.Job:
        """The job with its attempts.

        Raises:
            NotFound: no job matches.
            Conflict: several jobs match.
        """
        request = pb.GetJobRequest(workspace=self.workspace, id=job)
        return await self._connection.call(self._connection.scheduler.GetJob, request)

    async def job_id(self, job: str) -> str:
        """The full id of a job; only what is not one is asked for.

        Raises:
            NotFound: no job matches.
            Conflict: several jobs match.
        """
        return job if len(job) == _ID_LENGTH else (await self.get(job)).id

    async def list(
        self,
        *,
        states_in: Sequence[str] = (),
        queue: str = "",
        name_contains: str = "",
        labels: Mapping[str, str] | None = None,
        owner: pb.Owner | None = None,
        include_owned: bool = False,
        limit: int | None = None,
    ) -> AsyncIterator[pb.Job]:
        """Jobs, newest first, at most `limit`."""
        request = pb.ListJobsRequest(
            workspace=self.workspace,
            states=[states.parse(state) for state in states_in],
            queue=queue,
            name_contains=name_contains,
            labels=labels or {},
            owner=owner,
            include_owned=include_owned,
            page_size=min(limit or 1000, 1000),
        )
        seen = 0
        while True:
            page = await self._connection.call(self._connection.scheduler.ListJobs, request)
            for job in page.jobs:
                yield job
                seen += 1
                if seen == limit:
                    return
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    async def cancel(self, job: str, message: str = "") -> pb.Job:
        """Asks for the job's end. Accepted before the end, it makes the job `cancelled` whatever its exit.

        Raises:
            NotFound: there is no such job.
            Conflict: it has ended already.
        """
        request = pb.CancelJobRequest(workspace=self.workspace, id=job, message=message)
        return await self._connection.call(self._connection.scheduler.CancelJob, request)

    async def retry(self, job: str) -> pb.Job:
        """Puts a failed or cancelled job back to the queue, with a fresh retry budget.

        Raises:
            NotFound: there is no such job.
            Conflict: it has not ended, or it succeeded.
        """
        request = pb.RetryJobRequest(workspace=self.workspace, id=job)
        return await self._connection.call(self._connection.scheduler.RetryJob, request)

    async def explain(self, job: str) -> pb.Explanation:
        """Why the job is in its state, what is ahead of it, what it wants and what is free."""
        request = pb.ExplainJobRequest(workspace=self.workspace, id=job)
        return await self._connection.call(self._connection.scheduler.ExplainJob, request)

    async def events(self, job: str = "", after_seq: int = 0) -> AsyncIterator[pb.Event]:
        """Events so far, oldest first; of all jobs when `job` is empty."""
        request = pb.ListEventsRequest(workspace=self.workspace, job=job, after_seq=after_seq, page_size=5000)
        while True:
            page = await self._connection.call(self._connection.scheduler.ListEvents, request)
            for event in page.events:
                yield event
            if len(page.events) < request.page_size:
                return
            request.after_seq = page.events[-1].seq

    async def watch(self, job: str = "", after_seq: int = 0, *, from_now: bool = False) -> AsyncIterator[pb.Event]:
        """Events after a cursor, then new ones as they happen, each exactly once, also over a restart of the yard."""
        request = pb.WatchRequest(workspace=self.workspace, job=job, after_seq=after_seq, from_now=from_now)
        outage = Outage()
        while True:
            try:
                async for event in self._connection.stream(self._connection.scheduler.Watch, request):
                    outage.over()
                    request.after_seq, request.from_now = event.seq, False
                    yield event
                return
            except errors.NotRunning as lost:
                await self._connection.until_back(lost, outage)

    async def wait(self, job: str) -> pb.Job:
        """The job, once it has ended.

        Raises:
            NotFound: there is no such job.
            NeverFits: it is queued, and no machine can hold it.
        """
        return await self.until_ended(await self.get(job))

    async def until_ended(self, job: pb.Job) -> pb.Job:
        """`job`, as it was read before, once it has ended. A yard that is lost meanwhile is waited for.

        Raises:
            NeverFits: it is queued, and no machine can hold it.
        """
        outage = Outage()
        while job.state not in states.ENDED:
            check_fits(job)
            try:
                async for event in self.watch(job.id, job.event_seq):
                    if event.state in states.ENDED or event.state == pb.JOB_STATE_QUEUED:  # it may no longer fit
                        break
                job = await self.get(job.id)
                outage.over()
            except errors.NotRunning as lost:
                await self._connection.until_back(lost, outage)
        return job

    async def pools(self) -> Sequence[pb.Pool]:
        """The pools of machines, with what is free on each."""
        request = pb.ListPoolsRequest(workspace=self.workspace)
        return (await self._connection.call(self._connection.scheduler.ListPools, request)).pools


def check_fits(job: pb.Job) -> None:
    """Raises for a queued job that waiting does not help.

    Raises:
        NeverFits: no machine can hold it; the message says what to change.
    """
    if job.pending.never_fits:
        reference = job_reference(job)
        raise errors.NeverFits(
            f"{reference} can never start ({job.pending.reason}): {job.pending.message}",
            reason=job.pending.reason,
            hint=f"change the job file and submit it again; 'yard cancel {reference}' removes this job from the queue",
        )


def submit_request(
    source: Document, workspace: str, idempotency_key: str = "", owner: pb.Owner | None = None
) -> pb.SubmitRequest:
    """A request with an idempotency key, so that sending it again makes no second job."""
    return pb.SubmitRequest(
        workspace=workspace,
        document=source.message(),
        idempotency_key=idempotency_key or uuid4().hex,
        owner=owner,
    )
