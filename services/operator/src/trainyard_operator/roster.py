"""Everything the operator knows: the resources it saw, and the jobs they became."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from trainyard.spec.resource import UNMANAGED
from trainyard_protos.v1 import scheduler_pb2 as pb

from trainyard_operator import status
from trainyard_operator.resource import Resource

_STRAYS, _STRAY_EVENTS = 10_000, 50


@dataclass(slots=True)
class Tracked:
    """One resource.

    Attributes:
        resource: as it was last seen.
        wanted: what its status should say.
        changed: when the yard last said something new, as Kubernetes writes times.
        fresh: whether `wanted` holds what the yard says, so that events continue from there.
        latest: number of the newest event that arrived while it was not fresh. It may not be the first one missed, so
            it is read from the yard together with those before it.
        lost: whether the resource is gone, with its job left behind.
        settling: whether it was submitted just now. What most jobs then wait for takes no time, and is told in one go.
        looked: when its progress was last looked at (monotonic).
    """

    resource: Resource
    wanted: dict[str, Any] = field(default_factory=dict)
    changed: str = ""
    fresh: bool = False
    latest: int = 0
    lost: bool = False
    settling: bool = False
    looked: float = float("-inf")

    @property
    def job_id(self) -> str:
        return str(self.wanted.get("jobId") or "")

    @property
    def phase(self) -> str:
        return str(self.wanted.get("phase") or "")

    @property
    def over(self) -> bool:
        """Whether its job has ended."""
        return self.phase in status.ENDED

    @property
    def refused(self) -> bool:
        """Whether the yard refused this very spec."""
        return self.phase == status.REFUSED and self.wanted.get("observedGeneration") == self.resource.generation

    def say(self, fields: dict[str, Any], when: str) -> None:
        """Takes over what the yard says."""
        self.wanted.update(fields)
        self.changed = when

    def patch(self) -> dict[str, Any]:
        """What has to change in the stored status."""
        if self.settling and self.phase == status.QUEUED:
            return {}
        told = status.changes(self.wanted, self.resource.status)
        if told.keys() <= {"eventSeq"}:  # not worth a request by itself
            return {}
        before = self.resource.status.get("conditions") or ()
        when = self.changed or status.now()
        told["conditions"] = status.conditions(self.wanted, before, when, self.resource.generation)
        return told


class Roster:
    """Resources by their uid and by their job. Lives on the loop's thread."""

    def __init__(self) -> None:
        self._by_uid: dict[str, Tracked] = {}
        self._by_job: dict[str, Tracked] = {}
        self._strays: OrderedDict[str, list[pb.Event]] = OrderedDict()

    def __iter__(self) -> Iterator[Tracked]:
        return iter(tuple(self._by_uid.values()))

    def __len__(self) -> int:
        return len(self._by_uid)

    def get(self, uid: str) -> Tracked | None:
        return self._by_uid.get(uid)

    def of_job(self, job_id: str) -> Tracked | None:
        return self._by_job.get(job_id)

    def see(self, resource: Resource) -> Tracked | None:
        """Takes in the state of a resource; None when a newer one is known."""
        tracked = self._by_uid.get(resource.uid)
        if tracked is None:
            tracked = self._by_uid[resource.uid] = Tracked(resource, dict(resource.status))
            tracked.wanted.pop("conditions", None)
            if tracked.phase == UNMANAGED:  # by the removal of an earlier installation; it says nothing of the job
                tracked.wanted |= {"phase": None, "reason": None, "message": None}
            if tracked.job_id:
                self._by_job[tracked.job_id] = tracked
            return tracked
        if resource.version < tracked.resource.version:
            return None
        tracked.resource = resource
        return tracked

    def bind(self, tracked: Tracked, job: pb.Job) -> list[pb.Event]:
        """The resource became this job. Returns the events that came before that was known."""
        self._by_job[job.id] = tracked
        return self._strays.pop(job.id, [])

    def stray(self, event: pb.Event) -> None:
        """Keeps an event of a job that is no resource's yet; the answer to its submission may be on its way.

        Most such jobs never are a resource's, however long they run: the oldest events give way.
        """
        events = self._strays.setdefault(event.object_id, [])
        events.append(event)
        del events[:-_STRAY_EVENTS]
        if len(self._strays) > _STRAYS:
            self._strays.popitem(last=False)

    def remove(self, uid: str) -> None:
        """The resource is gone."""
        tracked = self._by_uid.pop(uid, None)
        if tracked is not None:
            self._by_job.pop(tracked.job_id, None)
