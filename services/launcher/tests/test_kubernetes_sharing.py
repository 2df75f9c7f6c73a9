"""A cluster is shared: with other yards, with strangers, with versions before and after, with people who delete things.

Against an API server that says what a test wants; `tests/cluster` has the real one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from api_server import (
    EVENTS,
    JOBS,
    NODES,
    PATIENCE_S,
    PODS,
    POLICIES,
    REVIEWS,
    SERVICES,
    ApiServer,
    Object,
    facts,
    job,
    launch,
    pod,
    review,
    talking_to,
    token,
    until,
)
from servicekit.ownership import LAUNCHER
from trainyard_launcher.backend import Found, JoinLater, JoinRefused, Launch, NodeEnd
from trainyard_launcher.backends.kubernetes import KubernetesBackend, names
from trainyard_launcher.backends.kubernetes.losses import Judgement
from trainyard_protos.v1 import common_pb2

OURS, THEIRS = facts(1), facts(2)


class Listener:
    """Hears what a backend tells."""

    def __init__(self) -> None:
        self.ends: list[NodeEnd] = []

    def ended(self, end: NodeEnd) -> None:
        self.ends.append(end)

    def remark(self, attempt_id: str, reason: str, text: str) -> None: ...

    def placed(self, attempt_id: str) -> None: ...

    def silent_s(self, attempt_id: str, node: int) -> float:
        return 0


@pytest.fixture
async def server() -> ApiServer:
    return ApiServer()


@pytest.fixture
async def backend(server: ApiServer, tmp_path: Path) -> AsyncIterator[KubernetesBackend]:
    async with talking_to(server, tmp_path) as found:
        yield found


async def opened(server: ApiServer, backend: KubernetesBackend, jobs: list[Object], pods: list[Object]) -> list[Found]:
    """What a launcher finds that begins in a cluster with these objects."""
    server.list(JOBS, *jobs)
    server.list(PODS, *pods)
    for path in (NODES, EVENTS, SERVICES):
        server.list(path)
    return list(await backend.open(Listener()))


def found_facts(found: list[Found]) -> list[object]:
    return [each.facts for each in found]


def without_label(of: Object) -> Object:
    """As launchers wrote it before they wrote their identity."""
    for metadata in (of["metadata"], of["spec"]["template"]["metadata"]):
        metadata["labels"] = {name: value for name, value in metadata["labels"].items() if name != LAUNCHER}
    return of


def annotated(text: str, **labels: str) -> Object:
    """Our Job with another annotation, and other labels."""
    made = job(OURS, annotations={names.FACTS: text})
    made["metadata"]["labels"] = made["metadata"]["labels"] | labels
    return made


async def _no_claim() -> Launch:
    raise AssertionError("nothing was forgotten")


# Other yards


async def test_a_yard_with_the_same_namespace_and_pool_keeps_its_jobs_and_pods(
    server: ApiServer, backend: KubernetesBackend
) -> None:
    theirs = job(THEIRS, launcher="there")
    orphan = pod(job(facts(3)))
    found = await opened(server, backend, [job(OURS), theirs], [pod(job(OURS)), pod(theirs), orphan])
    assert found_facts(found) == [OURS]
    await until(lambda: server.asked_to("DELETE"))
    assert server.asked_to("DELETE") == {f"{PODS}/{orphan['metadata']['name']}"}


async def test_usage_names_the_volume_claims_that_pods_mount_and_says_what_is_not_measured(
    server: ApiServer, backend: KubernetesBackend
) -> None:
    mounting = pod(job(OURS))
    claim = {"name": "data", "persistentVolumeClaim": {"claimName": "datasets"}}
    mounting["spec"]["volumes"] = [*mounting["spec"].get("volumes", []), claim]
    await opened(server, backend, [job(OURS)], [mounting])
    usage = await backend.usage()
    assert (len(usage.usage), len(usage.unread)) == (0, 2)
    assert "folders of attempts lie in their pods" in usage.unread[0]
    assert usage.unread[1].startswith("volume claim datasets of ")


async def test_a_job_from_before_the_label_is_taken_over_by_the_yard_that_its_pods_talk_to(
    server: ApiServer, backend: KubernetesBackend
) -> None:
    ours, theirs = without_label(job(OURS)), without_label(job(THEIRS, endpoint="other-yard:1"))
    found = await opened(server, backend, [ours, theirs], [pod(ours), pod(theirs)])
    assert found_facts(found) == [OURS]
    await backend.settle(OURS.attempt_id)
    await until(lambda: server.asked_to("DELETE"))
    assert server.asked_to("DELETE") == {f"{JOBS}/{ours['metadata']['name']}"}


# Failed attempts that are kept for people


def failed_pod(of: Object) -> Object:
    return pod(of) | {"status": {"phase": "Failed"}}


async def test_a_kept_job_is_not_taken_over_and_goes_when_the_yard_forgets_its_attempt(
    server: ApiServer, backend: KubernetesBackend
) -> None:
    kept = job(OURS, annotations={names.FACTS: names.facts_to(OURS), names.KEPT: "failed"})
    path = f"{JOBS}/{kept['metadata']['name']}"
    assert await opened(server, backend, [kept, job(THEIRS)], [failed_pod(kept), pod(job(THEIRS))]) != []
    assert backend._keeper.attempts.keys() == {THEIRS.attempt_id}
    assert server.asked_to("DELETE") == set()
    server.say("DELETE", path, (503, {"message": "away"}), (200, {}))
    assert await backend.forget([OURS.attempt_id]) == frozenset()
    assert await backend.forget([OURS.attempt_id]) == {OURS.attempt_id}


async def test_a_failed_job_is_removed_as_before_when_the_role_does_not_let_it_be_kept(
    server: ApiServer, backend: KubernetesBackend
) -> None:
    path = f"{JOBS}/{job(OURS)['metadata']['name']}"
    server.say("PATCH", path, (403, {"reason": "Forbidden", "message": "not by this role"}))
    await opened(server, backend, [job(OURS)], [failed_pod(job(OURS))])
    await backend.settle(OURS.attempt_id)
    await until(lambda: server.asked_to("DELETE"))
    assert (server.asked_to("PATCH"), server.asked_to("DELETE")) == ({path}, {path})


async def test_a_launcher_that_may_not_see_pods_of_others_begins_also_when_the_api_server_was_away_first(
    server: ApiServer, backend: KubernetesBackend
) -> None:
    server.say("GET", "/api/v1/pods", (503, {"message": "away"}), (403, {"message": "may not list pods"}))
    async with asyncio.timeout(PATIENCE_S):
        assert found_facts(await opened(server, backend, [job(OURS)], [])) == [OURS]


async def test_who_judges_machines_goes_on_when_the_cluster_says_what_nobody_understands(
    server: ApiServer, backend: KubernetesBackend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = 0

    async def judge(*_: object) -> Judgement:
        nonlocal asked
        asked += 1
        raise ValueError("no JSON")

    monkeypatch.setattr(backend._keeper.judge, "judge", judge)
    await opened(server, backend, [job(OURS)], [])
    await until(lambda: asked >= 2)
    assert "machines and images were not judged" in caplog.messages


# Other versions


async def test_what_a_later_version_adds_to_the_facts_is_passed_over(
    server: ApiServer, backend: KubernetesBackend
) -> None:
    written = json.loads(names.facts_to(OURS)) | {"elastic": True}
    [found] = await opened(server, backend, [annotated(json.dumps(written))], [])
    assert (found.facts, found.remark) == (OURS, None)


@pytest.mark.parametrize("text", ["{", "{}", '{"version": 2}', "[]"])
async def test_an_attempt_whose_facts_cannot_be_read_goes_on_by_its_labels_and_says_so(
    server: ApiServer, backend: KubernetesBackend, text: str
) -> None:
    made = annotated(text)
    [found] = await opened(server, backend, [made], [pod(made)])
    assert found.facts == OURS
    assert found.remark is not None
    reason, message = found.remark
    assert reason == "FactsUnreadable"
    assert made["metadata"]["name"] in message
    assert server.asked_to("DELETE") == set()


async def test_a_job_that_says_nothing_readable_at_all_is_left_alone_and_reported(
    server: ApiServer, backend: KubernetesBackend, caplog: pytest.LogCaptureFixture
) -> None:
    made, orphan = annotated("{", **{names.FENCE: "newest"}), pod(job(facts(3)))
    assert await opened(server, backend, [made], [pod(made), orphan]) == []
    await until(lambda: server.asked_to("DELETE"))
    assert server.asked_to("DELETE") == {f"{PODS}/{orphan['metadata']['name']}"}
    assert [vars(each)["reason"] for each in caplog.records if each.message == "job left alone"] == ["FactsUnreadable"]


# People who delete things


async def test_a_service_that_somebody_deletes_is_made_again_at_once(
    server: ApiServer, backend: KubernetesBackend
) -> None:
    made = job(facts(1, nodes=2))
    gone = {"metadata": made["metadata"] | {"resourceVersion": "2"}}
    server.say("POST", SERVICES, (201, {}))
    server.tell(SERVICES, {"type": "DELETED", "object": gone})
    await opened(server, backend, [made], [pod(made, 0), pod(made, 1)])
    # Once because it began, once because it was told.
    await until(lambda: server.asked.count(("POST", SERVICES)) == 2)


async def test_a_policy_that_somebody_deletes_is_made_again_at_once(server: ApiServer, tmp_path: Path) -> None:
    made = job(facts(1, nodes=2))
    gone = {"metadata": made["metadata"] | {"resourceVersion": "2"}}
    server.say("POST", SERVICES, (201, {}))
    server.say("POST", POLICIES, (201, {}))
    server.list(POLICIES)
    server.tell(POLICIES, {"type": "DELETED", "object": gone})
    async with talking_to(server, tmp_path, kubernetes_network_policies=True) as backend:
        await opened(server, backend, [made], [pod(made, 0), pod(made, 1)])
        await until(lambda: server.asked.count(("POST", POLICIES)) == 2)


async def test_nodes_are_let_to_each_other_before_they_find_each_other(server: ApiServer, tmp_path: Path) -> None:
    made = job(facts(1, nodes=2))
    server.say("POST", JOBS, (201, made))
    server.say("POST", POLICIES, (201, {}))
    server.say("POST", SERVICES, (201, {}))
    async with talking_to(server, tmp_path, kubernetes_network_policies=True) as backend:
        await backend.start(launch(facts(1, nodes=2)))
    assert [path for method, path in server.asked if method == "POST"] == [JOBS, POLICIES, SERVICES]


async def test_a_service_that_goes_with_its_job_is_not_made_again(
    server: ApiServer, backend: KubernetesBackend
) -> None:
    going = job(facts(1, nodes=2), deletionTimestamp="2030-01-01T00:00:00Z")
    kept = job(facts(2, nodes=2))
    server.say("POST", SERVICES, (201, {}))
    events = [
        {"type": "DELETED", "object": {"metadata": each["metadata"] | {"resourceVersion": "2"}}}
        for each in (going, kept)
    ]
    server.tell(SERVICES, *events)
    await opened(server, backend, [going, kept], [pod(each, node) for each in (going, kept) for node in range(2)])
    # Two because it began; the third is told after the one that must not be.
    await until(lambda: server.asked.count(("POST", SERVICES)) >= 3)
    assert server.asked.count(("POST", SERVICES)) == 3


# Plans


@pytest.mark.parametrize(("enforced", "threads"), [(True, 3), (False, 0)])
async def test_plans_speak_of_threads_where_cores_are_limited(
    server: ApiServer, tmp_path: Path, enforced: bool, threads: int
) -> None:
    made = job(OURS)
    server.say("POST", JOBS, (201, made))
    server.say("POST", REVIEWS, (201, review(pod(made))))
    async with talking_to(server, tmp_path, enforce_limits=enforced) as backend:
        await opened(server, backend, [], [pod(made)])
        await backend.start(replace(launch(OURS), per_worker=common_pb2.Resources(cpu=3.5)))
        joined = await backend.join(OURS.attempt_id, 0, token(pod(made)), _no_claim)
    assert joined.plan.threads == threads


# Strangers


async def test_strangers_cost_no_request_and_keep_nobody_out(server: ApiServer, backend: KubernetesBackend) -> None:
    made = job(facts(1, nodes=2))
    real = [pod(made, 0), pod(made, 1)]
    await opened(server, backend, [made], real)
    server.say("POST", SERVICES, (409, {}))
    server.say("POST", JOBS, (409, {}))
    server.say("GET", f"{JOBS}/{made['metadata']['name']}", (200, made))
    await backend.start(launch(facts(1, nodes=2)))
    server.asked.clear()
    forged = [token(pod(job(facts(2)), 0)), token(real[1]), "nonsense", "a.b.c", "x" * 100_000, "e30.bnVsbA.x"]
    for credential in forged * 50:
        with pytest.raises((JoinRefused, JoinLater)):
            await backend.join(OURS.attempt_id, 0, credential, _no_claim)
    asked = [each for each in server.asked if each[0] == "POST" or "x" in each[1]]
    assert len(asked) < 50  # ten, and one a second
    for node in range(2):
        server.say("POST", REVIEWS, (201, review(real[node])))
        joined = await backend.join(OURS.attempt_id, node, token(real[node]), _no_claim)
        assert joined.plan.nodes == 2


@pytest.mark.parametrize("name", ["../secrets", "x/log?follow=true", "..", "", "x?watch=true", "X"])
async def test_what_a_token_calls_its_pod_leads_nowhere_else(
    server: ApiServer, backend: KubernetesBackend, name: str
) -> None:
    made = job(OURS)
    await opened(server, backend, [made], [pod(made)])
    server.asked.clear()
    with pytest.raises(JoinRefused, match="names no pod"):
        await backend.join(OURS.attempt_id, 0, token({"metadata": {"name": name, "uid": "u"}}), _no_claim)
    assert not [path for method, path in server.asked if not path.endswith("?watch")]


async def test_a_token_that_says_it_is_the_pods_own_is_reviewed_now_and_then(
    server: ApiServer, backend: KubernetesBackend
) -> None:
    made = job(OURS)
    await opened(server, backend, [made], [pod(made)])
    server.say("POST", REVIEWS, (201, {"status": {"error": "signature"}}))
    for _ in range(200):
        with pytest.raises((JoinRefused, JoinLater)):
            await backend.join(OURS.attempt_id, 0, token(pod(made)), _no_claim)
    assert server.asked.count(("POST", REVIEWS)) < 100


async def test_a_token_is_believed_only_as_far_as_it_was_reviewed(
    server: ApiServer, backend: KubernetesBackend
) -> None:
    made = job(facts(1, nodes=2))
    await opened(server, backend, [made], [pod(made, 0), pod(made, 1)])
    server.say("POST", REVIEWS, (201, review(pod(made, 1))))
    with pytest.raises(JoinRefused, match="not one of this yard"):
        await backend.join(OURS.attempt_id, 0, token(pod(made, 0)), _no_claim)
