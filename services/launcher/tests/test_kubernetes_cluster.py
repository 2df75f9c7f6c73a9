"""The Kubernetes backend against an API server that misbehaves as `tests/cluster` cannot make the real one do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from api_server import JOBS, PATIENCE_S, PODS, REVIEWS, ApiServer, job, pod, talking_to, token, until
from trainyard.spec import Spec
from trainyard_launcher.backend import Facts, JoinLater, Launch, StartError
from trainyard_launcher.backends.kubernetes import KubernetesBackend, names
from trainyard_launcher.backends.kubernetes.attempts import Attempt
from trainyard_launcher.backends.kubernetes.watch import Mirror
from trainyard_protos.v1 import common_pb2

FACTS = Facts("default", "job-1", "digits", "0198c0de-0000-7000-8000-00123456789a", 3, 1, 1, 30)
LAUNCH = Launch(FACTS, [], common_pb2.Resources(cpu=1, memory_bytes=2**30), spec=Spec(command=("true",)))
JOB = {
    "metadata": {"name": names.object_name(FACTS), "uid": "uid-1", "annotations": {names.FACTS: names.facts_to(FACTS)}}
}


@pytest.fixture
async def server() -> ApiServer:
    return ApiServer()


@pytest.fixture
async def backend(server: ApiServer, tmp_path: Path) -> AsyncIterator[KubernetesBackend]:
    async with talking_to(server, tmp_path) as found:
        yield found


async def test_a_job_of_somebody_else_with_the_same_name_stays(server: ApiServer, backend: KubernetesBackend) -> None:
    server.say("POST", JOBS, (409, {"reason": "AlreadyExists"}))
    server.say("GET", f"{JOBS}/{names.object_name(FACTS)}", (200, {"metadata": {"name": "theirs", "uid": "theirs"}}))
    with pytest.raises(StartError, match=r"another Job named digits-.*: remove or rename it"):
        await backend.start(LAUNCH)
    assert [path for method, path in server.asked if method == "DELETE"] == []


async def test_a_job_that_was_made_before_is_taken_once_the_cluster_is_back(
    server: ApiServer, backend: KubernetesBackend
) -> None:
    server.say("POST", JOBS, (409, {"reason": "AlreadyExists"}))
    server.say("GET", f"{JOBS}/{names.object_name(FACTS)}", (503, {"message": "starting"}), (200, JOB))
    assert await backend.start(LAUNCH) == ""


async def test_a_pod_that_asks_while_its_job_is_being_made_is_not_refused_for_good(
    server: ApiServer, backend: KubernetesBackend
) -> None:
    server.say("POST", JOBS, (201, JOB))
    server.held.clear()
    starting = asyncio.create_task(backend.start(LAUNCH))
    await until(lambda: ("POST", JOBS) in server.asked)
    with pytest.raises(JoinLater, match="still being made"):
        async with asyncio.timeout(PATIENCE_S):
            await backend.join(FACTS.attempt_id, 0, "token", _no_claim)
    server.held.set()
    await starting


async def test_a_cluster_that_cannot_review_a_token_refuses_nobody_for_good(
    server: ApiServer, backend: KubernetesBackend
) -> None:
    server.say("POST", JOBS, (201, made := job(FACTS)))
    server.say("GET", f"{PODS}/{pod(made)['metadata']['name']}", (200, pod(made)))
    server.say("POST", REVIEWS, (403, {"message": "may not create tokenreviews"}))
    await backend.start(LAUNCH)
    with pytest.raises(JoinLater, match="may not create tokenreviews"):
        await backend.join(FACTS.attempt_id, 0, token(pod(made)), _no_claim)


async def _no_claim() -> Launch:
    raise AssertionError("nothing was forgotten")


async def test_a_watch_goes_on_after_what_it_does_not_understand(server: ApiServer, backend: KubernetesBackend) -> None:
    listed = {"metadata": {"resourceVersion": "1"}, "items": []}
    odd = {"type": "ADDED", "object": {"metadata": {"name": "odd", "resourceVersion": "2"}}}
    plain = {"type": "ADDED", "object": {"metadata": {"name": "plain", "resourceVersion": "3"}, "n": 1}}
    server.say("GET", PODS, (200, listed))
    server.say("GET", f"{PODS}?watch", (200, [odd]), (200, [plain]), (410, {"message": "too old"}))
    seen: list[str] = []
    mirror = Mirror(backend._api, PODS, lambda each: each["n"], lambda name, *_: seen.append(name))
    running = asyncio.create_task(mirror.run())
    try:
        await until(lambda: "plain" in seen)
    finally:
        running.cancel()
    assert "odd" not in seen


async def test_one_object_that_makes_trouble_keeps_nothing_from_the_others(
    server: ApiServer, backend: KubernetesBackend
) -> None:
    events = [
        {"type": "ADDED", "object": {"metadata": {"name": name, "resourceVersion": "2"}, "n": 1}}
        for name in ("odd", "plain")
    ]
    server.say("GET", PODS, (200, {"metadata": {"resourceVersion": "1"}, "items": []}))
    server.say("GET", f"{PODS}?watch", (200, events), (503, {"message": "away"}))
    seen: list[str] = []

    def changed(name: str, *_: object) -> None:
        if name == "odd":
            raise ValueError("odd")
        seen.append(name)

    running = asyncio.create_task(Mirror(backend._api, PODS, lambda each: each["n"], changed).run())
    try:
        await until(lambda: seen)
    finally:
        running.cancel()
    assert server.asked.count(("GET", PODS)) == 1


async def test_what_kept_a_pod_from_running_is_known_after_a_restart(backend: KubernetesBackend) -> None:
    from trainyard_launcher.backends.kubernetes import pods

    keeper = backend._keeper
    blocked = {"conditions": [{"type": "PodScheduled", "status": "False", "message": "no gpu"}], "phase": "Pending"}
    labels = {names.ATTEMPT_ID: FACTS.attempt_id, names.INDEX: "0"}
    found = pods.read({"metadata": {"name": "pod", "uid": "uid-2", "labels": labels}, "status": blocked})
    assert found is not None
    keeper.pods.objects["pod"] = found
    attempt = Attempt(FACTS, names.object_name(FACTS), "uid-1")
    assert keeper.take_over(attempt) == []
    keeper.keep(attempt)
    assert backend.place(FACTS.attempt_id, 0).reason == "Unschedulable"
