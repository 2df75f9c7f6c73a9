"""A pod goes to its planned machine or waits for one of its kind; a gang begins as a whole; no room is told.

Against an API server that says what a test wants; `tests/cluster` has the real one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from api_server import (
    EVENTS,
    JOBS,
    NODES,
    PATIENCE_S,
    PODS,
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
from trainyard_launcher.backend import Facts, NodeEnd
from trainyard_launcher.backends.kubernetes import KubernetesBackend, binding, kinds
from trainyard_launcher.backends.kubernetes.machines import Machine

GANG = replace(facts(nodes=2), machines=("node-1", "node-2"), kinds=("", ""))
DECLARED = {
    "name": "a100",
    "max": 4,
    "resources": {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": 8},
    "labels": {"gpu": "a100", "pool": "train"},
    "taints": [{"key": "gpu", "value": "a100"}],
    "provisionTimeout": "20m",
}
KINDS = kinds.read_kinds(json.dumps([DECLARED]))
NO_ROOM = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes are available"}


class Listener:
    """Hears what a backend tells."""

    def __init__(self) -> None:
        self.ends: list[NodeEnd] = []
        self.remarks: list[tuple[str, str]] = []
        self.moved: list[str] = []

    def ended(self, end: NodeEnd) -> None:
        self.ends.append(end)

    def remark(self, attempt_id: str, reason: str, text: str) -> None:
        self.remarks.append((reason, text))

    def placed(self, attempt_id: str) -> None:
        self.moved.append(attempt_id)

    def silent_s(self, attempt_id: str, node: int) -> float:
        return 0


def terms(spec: dict[str, Any]) -> Any:
    affinity = spec["affinity"]["nodeAffinity"]
    return affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]


def on(*names: str) -> list[Object]:
    return [{"key": "metadata.name", "operator": "In", "values": [name]} for name in names]


def test_nodes_that_share_a_machine_are_bound_to_it_by_their_template() -> None:
    spec: dict[str, Any] = {}
    binding.bind_template(spec, replace(GANG, machines=("node-1", "node-1")), ())
    assert terms(spec) == [{"matchFields": on("node-1")}]
    assert "schedulingGates" not in spec


def test_nodes_that_wait_for_a_kind_are_bound_to_its_labels() -> None:
    spec: dict[str, Any] = {}
    binding.bind_template(spec, replace(GANG, machines=("", ""), kinds=("a100", "a100")), KINDS)
    found = {each["key"]: each["values"] for each in terms(spec)[0]["matchExpressions"]}
    assert found == {"gpu": ["a100"], "pool": ["train"]}


def test_nodes_on_several_machines_are_held_until_each_is_told_its_own() -> None:
    spec: dict[str, Any] = {}
    binding.bind_template(spec, GANG, ())
    assert spec == {"schedulingGates": [{"name": binding.GATE}]}


def test_attempts_of_earlier_versions_go_where_the_cluster_likes() -> None:
    spec: dict[str, Any] = {}
    binding.bind_template(spec, facts(nodes=2), ())
    assert spec == {}


def test_a_kind_is_told_with_the_machines_that_there_are() -> None:
    def machine(name: str, **labels: str) -> Machine:
        return Machine(name, False, True, labels, (), 1, 1, 1, {}, "", "")

    known = [machine("one", gpu="a100", pool="train", zone="b"), machine("two", gpu="a100")]
    told = KINDS[0].offer(known, "nvidia.com/gpu", ())
    assert (told.name, told.max, list(told.machines), told.provision_timeout_s) == ("a100", 4, ["one"], 1200)
    assert (told.total.cpu, told.total.memory_bytes, told.total.gpu, told.total.pods) == (8, 2**36, 8, 110)
    assert [(each.key, each.value, each.effect) for each in told.taints] == [("gpu", "a100", "NoSchedule")]
    assert not KINDS[0].offer((), "nvidia.com/gpu", [{"key": "gpu", "operator": "Exists"}]).taints


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"max": 0}, r"0\.max: .*greater than or equal to 1"),
        ({"labels": {}}, r"0\.labels"),
        ({"maxx": 1}, r"0\.maxx"),
        ({"provisionTimeout": "soon"}, "soon"),
        ({"resources": {"cpu": "many"}}, "many"),
    ],
)
def test_a_kind_that_is_declared_wrongly_is_refused_with_its_field(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=f"kubernetes_machine_kinds: .*{says}"):
        kinds.read_kinds(json.dumps([DECLARED | change]))
    with pytest.raises(ValueError, match="name of its own"):
        kinds.read_kinds(json.dumps([DECLARED, DECLARED]))


# With an API server


@asynccontextmanager
async def opened(
    folder: Path, of: Facts, pods: list[Object], **settings: Any
) -> AsyncIterator[tuple[ApiServer, KubernetesBackend, Listener]]:
    server, listener = ApiServer(), Listener()
    given = {"kubernetes_machine_kinds": json.dumps([DECLARED])} | settings
    async with talking_to(server, folder, **given) as backend:
        server.list(JOBS, job(of))
        server.list(PODS, *pods)
        for path in (NODES, EVENTS, SERVICES):
            server.list(path)
        for found in pods:
            server.say("GET", f"{PODS}/{found['metadata']['name']}", (200, found))
            server.say("POST", REVIEWS, (201, review(pods[0])))
        await backend.open(listener)
        yield server, backend, listener


def pending(of: Object, node: int = 0, *conditions: Object, **spec: Any) -> Object:
    """A pod that the cluster's scheduler has not placed."""
    found = pod(of, node)
    found["spec"] = {name: value for name, value in found["spec"].items() if name != "nodeName"} | spec
    found["status"] = {"phase": "Pending", "conditions": list(conditions)}
    return found


async def test_a_lost_machine_that_the_cluster_calls_ready_is_announced_as_unusable(tmp_path: Path) -> None:
    async with opened(tmp_path, GANG, []) as (_, backend, _listener):
        keeper = backend._keeper
        keeper.machines.objects["node-1"] = Machine("node-1", True, False, {}, (), 1, 1, 1, {}, "", "")
        assert [each.name for each in backend.offer().machines] == ["node-1"]
        keeper.judge.gone = frozenset({"node-1"})
        offer = backend.offer()
        assert list(offer.machines) == []
        assert [each.name for each in offer.unusable_machines] == ["node-1"]


async def test_what_the_pod_of_an_empty_job_requests_is_announced(tmp_path: Path) -> None:
    async with opened(tmp_path, GANG, []) as (_, backend, _listener):
        overhead = backend.offer().overhead
        assert (overhead.cpu, overhead.memory_bytes, overhead.gpu, overhead.pods) == (0.05, 96 << 20, 0, 1)


@pytest.mark.parametrize("of", [GANG, replace(GANG, machines=("node-1", "node-1"))], ids=["gated", "bound"])
async def test_the_job_that_is_made_says_where_its_pods_go(tmp_path: Path, of: Facts) -> None:
    async with opened(tmp_path, replace(of, attempt_id="another"), []) as (server, backend, _):
        for path in (JOBS, SERVICES):
            server.say("POST", path, (201, job(of)))
        await backend.start(launch(of))
        spec = server.bodies["POST", JOBS]["spec"]["template"]["spec"]
        expected: dict[str, Any] = {}
        binding.bind_template(expected, of, KINDS)
        assert expected.items() <= spec.items()


async def test_a_gated_pod_is_told_its_machine_and_let_go(tmp_path: Path) -> None:
    gates = [{"name": "quota"}, {"name": binding.GATE}]
    held = [pending(job(GANG), node, schedulingGates=gates) for node in range(2)]
    async with opened(tmp_path, GANG, held) as (server, *_):
        await until(lambda: len(server.asked_to("PATCH")) == 2)
        for node, each in enumerate(held):
            spec = server.bodies["PATCH", f"{PODS}/{each['metadata']['name']}"]["spec"]
            assert terms(spec) == [{"matchFields": on(f"node-{node + 1}")}]
            assert spec["schedulingGates"] == [{"name": "quota"}]


async def test_a_gated_pod_that_the_cluster_does_not_let_be_bound_ends_its_attempt(tmp_path: Path) -> None:
    held = [pending(job(GANG), node, schedulingGates=[{"name": binding.GATE}]) for node in range(2)]
    async with opened(tmp_path, GANG, held) as (server, _, listener):
        name = held[1]["metadata"]["name"]
        server.say("PATCH", f"{PODS}/{name}", (403, {"reason": "Forbidden", "message": "not by policy"}))
        server.tell(PODS, {"type": "MODIFIED", "object": held[1]})
        await until(lambda: f"{PODS}/{name}" in server.asked_to("DELETE"))
        server.tell(PODS, {"type": "DELETED", "object": held[1]})
        await until(lambda: listener.ends)
        cause = listener.ends[0].cause
        assert cause is not None
        assert (cause.reason, cause.node) == ("PodsRefused", 1)
        assert "not by policy" in cause.message


async def test_no_node_of_a_gang_begins_before_all_have_a_machine(tmp_path: Path) -> None:
    of, made = GANG, job(GANG)
    first, second = pod(made, 0), pending(made, 1, NO_ROOM)
    placed = {"type": "MODIFIED", "object": pod(made, 1)}
    async with opened(tmp_path, of, [first, second]) as (server, backend, _):
        assert backend.awaits_machines(of.attempt_id)

        async def claim() -> Any:
            return launch(of)

        joining = asyncio.create_task(backend.join(of.attempt_id, 0, token(first), claim))
        await until(lambda: ("GET", f"{PODS}?watch") in server.asked)
        assert ("POST", REVIEWS) not in server.asked
        server.tell(PODS, placed)
        async with asyncio.timeout(PATIENCE_S):
            assert (await joining).plan.nodes == 2
        assert not backend.awaits_machines(of.attempt_id)


async def test_a_pod_that_finds_no_room_on_its_machine_ends_the_attempt_as_unschedulable(tmp_path: Path) -> None:
    of = replace(facts(), machines=("node-1",), kinds=("",))
    found = pending(job(of), 0, NO_ROOM)
    async with opened(tmp_path, of, [found], kubernetes_unschedulable_patience_s=0) as (server, _, listener):
        await until(lambda: server.asked_to("DELETE"))
        server.tell(PODS, {"type": "DELETED", "object": found})
        await until(lambda: listener.ends)
        cause = listener.ends[0].cause
        assert cause is not None
        assert (cause.reason, cause.node) == ("Unschedulable", 0)
        assert "0/3 nodes are available" in cause.message


async def test_a_pod_that_waits_for_a_machine_of_a_kind_is_not_given_up_and_its_machine_is_told(tmp_path: Path) -> None:
    of = replace(facts(), machines=("",), kinds=("a100",))
    found = pending(job(of), 0, NO_ROOM)
    async with opened(tmp_path, of, [found], kubernetes_unschedulable_patience_s=0) as (server, backend, listener):
        server.tell(PODS, {"type": "MODIFIED", "object": pending(job(of), 0, NO_ROOM, priority=1)})
        await until(lambda: backend.place(of.attempt_id, 0).reason)
        place = backend.place(of.attempt_id, 0)
        assert place.reason == "WaitingForMachines"
        assert "kind 'a100'" in place.message
        backend._keeper._judge_pods(1e12)
        assert server.asked_to("DELETE") == set()
        server.tell(PODS, {"type": "MODIFIED", "object": pod(job(of), 0)})
        await until(lambda: listener.moved == [of.attempt_id])
        assert backend.place(of.attempt_id, 0).machine == "node-1"
        assert listener.ends == []
