"""What a resource says once its job is over is what the yard knew last, in whatever order that became known."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, cast

import pytest
from trainyard.cluster import Api
from trainyard.errors import NotRunning
from trainyard_operator.announcer import Announcer
from trainyard_operator.controller import Controller
from trainyard_operator.queue import Later
from trainyard_operator.resource import FINALIZER, read, taken
from trainyard_operator.settings import Settings
from trainyard_operator.yard import Yard
from trainyard_protos.v1 import common_pb2, metrics_pb2
from trainyard_protos.v1 import scheduler_pb2 as pb

STORED = {"jobId": "j-1", "phase": "Running", "step": 12, "totalSteps": 20, "progress": "12/20 (60%)",
          "best": "accuracy=0.6", "timeLeft": "3s", "eventSeq": 5}  # fmt: skip
BEST = {"path": "c", "pattern": "s-{step}", "keep": {"best": {"metric": "accuracy", "mode": "max"}}}
LAST = metrics_pb2.SeriesInfo(name="accuracy", count=20, max_value=0.99)
FAR = common_pb2.Progress(step=20, total_steps=20, updated_ns=1)
RUNNING = pb.Job(id="j-1", state=pb.JOB_STATE_RUNNING, event_seq=5)
ENDED = pb.Job(
    id="j-1", state=pb.JOB_STATE_SUCCEEDED, event_seq=9, exit=common_pb2.Exit(reason="Completed", progress=FAR)
)


class Stored:
    """The API server's one resource, of a job that runs."""

    def __init__(self) -> None:
        metadata = {"name": "digits", "namespace": "team", "uid": "u-1", "resourceVersion": "1"}
        self.status: dict[str, Any] = dict(STORED)
        self.body = {
            "apiVersion": "trainyard.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": metadata | {"finalizers": [FINALIZER], "annotations": taken("trainyard", "u-1")},
            "spec": {"command": ["true"], "checkpoints": BEST},
            "status": self.status,
        }
        self.patches: list[Mapping[str, Any]] = []

    async def patch(self, path: str, patch: Mapping[str, Any]) -> dict[str, Any]:
        self.patches.append(patch["status"])
        self.status.update(patch["status"])
        self.body["metadata"]["resourceVersion"] = str(len(self.patches) + 1)
        return self.body


class Known:
    """What the yard answers.

    Attributes:
        meanwhile: called while a question for the job is under way.
    """

    def __init__(self) -> None:
        self.metrics_away = False
        self.job_now = ENDED
        self.all_events: list[pb.Event] = []
        self.meanwhile: Callable[[], None] = lambda: None

    async def job(self, job_id: str) -> pb.Job:
        answer = self.job_now
        self.meanwhile()
        return answer

    async def events(self, job_id: str, after_seq: int) -> AsyncIterator[pb.Event]:
        for event in self.all_events:
            if event.seq > after_seq:
                yield event

    async def series(self, job_id: str, name: str) -> metrics_pb2.SeriesInfo:
        if self.metrics_away:
            raise NotRunning("metrics is away")
        return LAST


class Followed:
    """A controller that follows the resource; nothing of its queue runs by itself."""

    def __init__(self) -> None:
        self.stored, self.known = Stored(), Known()
        self.start()

    def start(self, **status: Any) -> None:
        """The operator starts, with this in the stored status."""
        self.stored.status.update(status)
        api = cast("Api", self.stored)
        self.controller = Controller(api, cast("Yard", self.known), Announcer(api), Settings())
        self.controller.seen(read(self.stored.body))

    def ends(self) -> None:
        self.known.job_now = ENDED
        self.controller.happened(
            pb.Event(seq=9, kind="Job", object_id="j-1", type="Succeeded", state=pb.JOB_STATE_SUCCEEDED)
        )

    async def work(self) -> None:
        await self.controller._reconcile("u-1")


@pytest.fixture
async def followed() -> Followed:
    return Followed()


def shown(status: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(status.get(name) for name in ("phase", "progress", "step", "best", "timeLeft"))


WHOLE = ("Succeeded", "20/20 (100%)", 20, "accuracy=0.99", None)


async def test_the_last_progress_and_best_value_are_written_with_the_end(followed: Followed) -> None:
    followed.ends()
    await followed.work()
    (patch,) = followed.stored.patches
    assert shown(patch) == WHOLE


async def test_an_end_is_told_without_a_best_value_that_nobody_can_be_asked_for_and_that_follows(
    followed: Followed,
) -> None:
    followed.ends()
    followed.known.metrics_away = True
    for _ in range(2):
        with pytest.raises(Later):
            await followed.work()
        assert shown(followed.stored.status) == ("Succeeded", "20/20 (100%)", 20, "accuracy=0.6", None)
    followed.known.metrics_away = False
    for _ in range(2):
        await followed.work()
    assert shown(followed.stored.status) == WHOLE
    assert len(followed.stored.patches) == 2


async def test_an_answer_from_before_the_end_does_not_undo_it(followed: Followed) -> None:
    followed.known.job_now, followed.known.meanwhile = RUNNING, followed.ends
    for _ in range(2):  # the event has it asked for again
        await followed.work()
    assert shown(followed.stored.status) == WHOLE


async def test_an_end_of_which_no_progress_is_known_keeps_what_was_shown(followed: Followed) -> None:
    followed.ends()
    followed.known.job_now = pb.Job(id="j-1", state=pb.JOB_STATE_FAILED, event_seq=9)
    await followed.work()
    assert shown(followed.stored.status)[:3] == ("Failed", "12/20 (60%)", 12)


def note(seq: int, reason: str) -> pb.Event:
    return pb.Event(seq=seq, kind="Job", object_id="j-1", type="Note", state=pb.JOB_STATE_STARTING, reason=reason,
                    message=f"{reason} it is")  # fmt: skip


STARTING = pb.Job(id="j-1", state=pb.JOB_STATE_STARTING, event_seq=8)


async def test_a_reason_that_was_stored_stays_when_the_operator_starts_again(followed: Followed) -> None:
    followed.known.job_now = pb.Job(id="j-1", state=pb.JOB_STATE_STARTING, event_seq=5)
    followed.start(phase="Starting", reason="ImageUnavailable", message="no such image")
    await followed.work()
    assert (followed.stored.status["reason"], followed.stored.status["message"]) == (
        "ImageUnavailable",
        "no such image",
    )


async def test_a_reason_that_only_missed_events_say_is_found(followed: Followed) -> None:
    admitted = pb.Event(seq=6, kind="Job", object_id="j-1", type="Admitted", state=pb.JOB_STATE_STARTING)
    placed = note(8, "Placed")
    followed.known.job_now, followed.known.all_events = STARTING, [admitted, note(7, "ImageUnavailable"), placed]
    followed.controller.happened(placed)  # the first that is heard, before the job is asked for
    await followed.work()
    assert (followed.stored.status["reason"], followed.stored.status["eventSeq"]) == ("ImageUnavailable", 8)


async def test_a_reason_that_missed_events_ended_is_removed(followed: Followed) -> None:
    followed.start(phase="Starting", reason="ImageUnavailable", message="no such image")
    runs = pb.Event(seq=8, kind="Job", object_id="j-1", type="Running", state=pb.JOB_STATE_RUNNING)
    followed.known.job_now = pb.Job(id="j-1", state=pb.JOB_STATE_RUNNING, event_seq=8)
    followed.known.all_events = [runs]
    await followed.work()
    assert (followed.stored.status["phase"], followed.stored.status["reason"]) == ("Running", None)
