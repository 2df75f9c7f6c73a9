"""Brings each resource and its job together, whatever happened meanwhile to one of them or to the operator itself.

    seen, no job        take (finalizer, name) -> submit under the uid -> status
    seen, with a job    ask for the job once, then follow its events
    refused             status says which field; tried again when the spec changes
    being deleted       cancel -> wait for the end -> let go
    another's           left alone

Everything can be done twice: the uid makes one job of two submissions, a patch of what is so already changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

from trainyard.cluster import Api, ApiError
from trainyard.errors import Conflict, Exhausted, InvalidArgument, InvalidSpec, NotFound, YardError
from trainyard_protos.v1 import scheduler_pb2 as pb

from trainyard_operator import progress, status, words
from trainyard_operator.announcer import Announcer
from trainyard_operator.queue import Later, Queue
from trainyard_operator.resource import FINALIZER, Resource, read, submit_request, taken
from trainyard_operator.roster import Roster, Tracked
from trainyard_operator.settings import Settings
from trainyard_operator.yard import Yard

logger = logging.getLogger(__name__)

_DELETED = "its resource was deleted"
_ASK = frozenset({"Requeued", "RetriedByUser"})
_SETTLE_S = 0.2
_GONE, _CONFLICT = 404, 409


class Controller:
    """Lives on the loop's thread. `seen`, `gone` and `happened` only take note; the work is done by the queue."""

    def __init__(self, api: Api, yard: Yard, announcer: Announcer, settings: Settings) -> None:
        self._api = api
        self._yard = yard
        self._announcer = announcer
        self._identity = settings.identity
        self._secrets_checked = settings.secrets_checked
        self.roster = Roster()
        self.queue = Queue(self._reconcile, settings.workers, settings.retry_s)

    # What happens

    def seen(self, resource: Resource) -> None:
        """A resource was listed, created or changed."""
        tracked = self.roster.see(resource)
        if tracked is None:
            return
        if resource.operator not in ("", self._identity):
            self.roster.remove(resource.uid)  # that one was faster, or is the only one that knows its job
        elif self._needs_work(tracked):
            self.queue.add(resource.uid)

    def _needs_work(self, tracked: Tracked) -> bool:
        if tracked.resource.deleting:
            return tracked.resource.held
        unsettled = not self._settled(tracked) and not tracked.over and not tracked.refused
        return unsettled or bool(tracked.patch())

    def _settled(self, tracked: Tracked) -> bool:
        """Whether it says what the yard says, and is ours until its job is over: `kubectl replace` takes that off."""
        return tracked.fresh and (tracked.over or tracked.resource.taken_by(self._identity))

    def gone(self, uid: str) -> None:
        """A resource is no longer there. One that was not let go (its finalizer was taken by force) leaves a job."""
        tracked = self.roster.get(uid)
        if tracked is None or not tracked.job_id or tracked.over:
            self.roster.remove(uid)
            return
        tracked.lost = True
        self.queue.add(uid)

    def happened(self, event: pb.Event) -> None:
        """The yard tells of a job."""
        if event.kind != "Job":
            return
        tracked = self.roster.of_job(event.object_id)
        if tracked is None:
            self.roster.stray(event)
        else:
            self._take(tracked, event)
            self.queue.add(tracked.resource.uid)

    def _take(self, tracked: Tracked, event: pb.Event) -> None:
        if event.seq <= tracked.wanted.get("eventSeq", 0):
            return
        if not tracked.fresh:
            tracked.latest = event.seq
            return
        tracked.say(status.of_event(event), status.moment(event.time_ns) or status.now())
        if tracked.over or event.type in _ASK:
            tracked.fresh = False  # how it ended, and what it waits for, are in the job alone
        self._announcer.tell(event, tracked.resource)

    def distrust(self) -> None:
        """Events may have been missed: every job that is not over is asked for again."""
        for tracked in self.roster:
            if not tracked.over and not tracked.refused:
                tracked.fresh = False
                self.queue.add(tracked.resource.uid)

    # What is done

    async def _reconcile(self, uid: str) -> None:
        tracked = self.roster.get(uid)
        if tracked is None:
            return
        try:
            if tracked.lost:
                await self._ending(tracked)
                self.roster.remove(uid)
            elif tracked.resource.deleting:
                await self._retire(tracked)
            elif not tracked.job_id and not tracked.refused:
                await self._submit(tracked)
            elif tracked.job_id and not self._settled(tracked):
                await self._refresh(tracked)
            await self._write(tracked)
        except ApiError as error:
            if error.status == _GONE:
                self.roster.remove(uid)
            elif error.away or error.status == _CONFLICT:
                raise Later(f"the API server: {error}") from error
            else:
                raise
        except YardError as error:
            raise Later(f"the yard: {error}") from error

    async def _submit(self, tracked: Tracked) -> None:
        """Taken before it is submitted: by one operator, which always cancels the job when the resource is deleted."""
        if not tracked.resource.taken_by(self._identity):
            await self._claim(tracked)
        try:
            answer = await self._yard.submit(self._request(tracked))
        except Exhausted:
            raise
        except (InvalidSpec, InvalidArgument, Conflict) as error:
            self._refuse(tracked, error)
            return
        self._accept(tracked, answer)
        if not answer.created:  # by a previous instance of the operator
            await self._refresh(tracked)

    def _request(self, tracked: Tracked) -> pb.SubmitRequest:
        return submit_request(tracked.resource, secrets_checked=self._secrets_checked)

    def _accept(self, tracked: Tracked, answer: pb.SubmitResponse) -> None:
        """The resource has a job; its events count from the first one on."""
        job = answer.job
        early = self.roster.bind(tracked, job)
        tracked.say(_said(job, tracked) | {"eventSeq": 0}, status.moment(job.updated_ns) or status.now())
        tracked.resource = tracked.resource.submitted()
        tracked.fresh, tracked.settling = answer.created, True
        asyncio.get_running_loop().call_later(_SETTLE_S, self._settle, tracked)
        for event in early:
            self._take(tracked, event)

    def _settle(self, tracked: Tracked) -> None:
        tracked.settling = False
        if tracked.patch():
            self.queue.add(tracked.resource.uid)

    def _refuse(self, tracked: Tracked, error: YardError) -> None:
        fields = status.of_refusal(error) | {"observedGeneration": tracked.resource.generation}
        tracked.say(fields, status.now())
        event = words.of_refusal(fields["reason"], fields["message"], tracked.changed, tracked.resource)
        self._announcer.post(event)

    async def _refresh(self, tracked: Tracked) -> None:
        """Asks for the job, and for the events that were missed: why its pods do not run is said by them alone."""
        tracked.fresh, tracked.latest = False, 0
        known = dict(tracked.wanted)
        try:
            job = await self._yard.job(tracked.job_id)
            async for event in self._missed(job, known.get("eventSeq", 0)):
                known |= status.of_event(event)
                self._announcer.tell(event, tracked.resource)
        except NotFound:
            if not tracked.resource.operator:  # of a time without names: it may be a job of another yard
                self.roster.remove(tracked.resource.uid)
                return
            tracked.say({} if tracked.over else status.of_forgotten(), status.now())
            tracked.fresh = True
            return
        if tracked.latest > job.event_seq:
            return  # what happened after that answer brings it here again
        self.roster.bind(tracked, job)
        tracked.say(_said(job, tracked, known), status.moment(job.updated_ns) or status.now())
        if not tracked.over and not tracked.resource.taken_by(self._identity):
            await self._claim(tracked)
        tracked.fresh = True
        if tracked.over:
            tracked.wanted.update(await self._last_best(tracked))

    async def _missed(self, job: pb.Job, after_seq: int) -> AsyncIterator[pb.Event]:
        """The events after a number, up to the one that the job is known by."""
        if job.event_seq > after_seq:
            async for event in self._yard.events(job.id, after_seq):
                if event.seq > job.event_seq:
                    return
                yield event

    async def _last_best(self, tracked: Tracked) -> status.Fields:
        """Told with the end. While nobody can be asked for it the end is told alone, and this follows."""
        try:
            return await self.best(tracked)
        except YardError:
            tracked.fresh = False
            await self._write(tracked)
            raise

    async def best(self, tracked: Tracked) -> status.Fields:
        """The best value so far of the metric that the resource names, if it names one. Raises YardError."""
        if tracked.resource.best is None:
            return {}
        name, mode = tracked.resource.best
        series = await self._yard.series(tracked.job_id, name)
        return progress.of_best(series, mode) if series is not None else {}

    async def _retire(self, tracked: Tracked) -> None:
        """Cancels the job of a resource that is being deleted, and lets it go once nothing of it runs."""
        if not tracked.resource.held:
            return
        if not tracked.over and await self._ending(tracked):
            return  # the event of its end brings it here again
        await self._patch_metadata(tracked, {"finalizers": _others(tracked.resource)})
        self.roster.remove(tracked.resource.uid)

    async def _ending(self, tracked: Tracked) -> bool:
        """Whether the job of a deleted resource still ends; asks for its end first."""
        try:
            if not tracked.job_id:  # held, but perhaps never submitted: submitting tells
                if tracked.refused:
                    return False
                self._accept(tracked, await self._yard.submit(self._request(tracked)))
            job = await self._yard.cancel(tracked.job_id, _DELETED)
        except Exhausted:
            raise
        except (InvalidSpec, InvalidArgument, NotFound, Conflict):
            return False  # there is no such job, or it is over
        tracked.say(_said(job, tracked), status.moment(job.updated_ns) or status.now())
        tracked.fresh = True
        return not tracked.over

    # What is written

    async def _claim(self, tracked: Tracked) -> None:
        """One request, which the API server refuses to all but one of several operators."""
        annotations = taken(self._identity, tracked.resource.uid)
        finalizers = [*_others(tracked.resource), FINALIZER]
        await self._patch_metadata(tracked, {"finalizers": finalizers, "annotations": annotations})

    async def _patch_metadata(self, tracked: Tracked, metadata: dict[str, object]) -> None:
        seen = {"uid": tracked.resource.uid, "resourceVersion": str(tracked.resource.version)}
        patch = {"metadata": seen | metadata}
        self._stored(tracked, await self._api.patch(tracked.resource.path, patch))

    async def _write(self, tracked: Tracked) -> None:
        patch = tracked.patch()
        if patch and self.roster.get(tracked.resource.uid) is tracked:
            whole = {"metadata": {"uid": tracked.resource.uid}, "status": patch}
            self._stored(tracked, await self._api.patch(f"{tracked.resource.path}/status", whole))

    def _stored(self, tracked: Tracked, body: dict[str, object]) -> None:
        now = read(body)
        if now.version >= tracked.resource.version:
            tracked.resource = now.submitted() if tracked.job_id else now


def _others(resource: Resource) -> list[str]:
    """The finalizers that are not ours."""
    return [name for name in resource.finalizers if name != FINALIZER]


def _said(job: pb.Job, tracked: Tracked, known: status.Fields | None = None) -> status.Fields:
    return status.of_job(job, known) | {"observedGeneration": tracked.resource.generation}
