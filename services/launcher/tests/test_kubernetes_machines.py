"""Which machines are lost, and what others take of the machines. `tests/cluster` has the real cluster."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from trainyard.cluster import ApiError
from trainyard_launcher.backends.kubernetes import foreign, losses, machines, manifests, placement, pods
from trainyard_launcher.backends.kubernetes.judge import Judge
from trainyard_launcher.backends.kubernetes.leases import Leases
from trainyard_launcher.backends.kubernetes.merge import merged
from trainyard_launcher.settings import Settings
from trainyard_protos.v1 import common_pb2

LIMIT_S = 20


class Kubelets:
    """An API server that has the leases of kubelets, which renew them every ten seconds unless they are gone.

    Its clock is theirs.
    """

    def __init__(self, *names: str) -> None:
        self.now = 0.0
        self.gone: dict[str, float] = {}
        self.names = names
        self.asked: list[str] = []
        self.slow_s: dict[str, float] = {}
        self.phases: dict[str, float] = {}
        self.duration_s = 40
        self.refusal: ApiError | None = None

    async def get(self, path: str, **_: str) -> dict[str, Any]:
        name = path.rpartition("/")[2]
        self.asked.append(name)
        if self.refusal is not None:
            raise self.refusal
        self.now += self.slow_s.pop(name, 0)
        every_s, phase = self.duration_s // 4, self.phases.get(name, 0)
        renewed = (min(self.now, self.gone.get(name, math.inf)) - phase) // every_s * every_s
        return {"spec": {"renewTime": f"{renewed}", "leaseDurationSeconds": self.duration_s}}

    async def watch(self, leases: Leases, silent: str, *, for_s: int, witness: str | None = "well") -> None:
        """Looks every second for a while."""
        for _ in range(for_s):
            self.now += 1
            await leases.look({silent}, witness, self.now)


@pytest.fixture
def kubelets() -> Kubelets:
    return Kubelets("silent", "well")


@pytest.fixture
def leases(kubelets: Kubelets) -> Leases:
    return Leases(kubelets, LIMIT_S, lambda: kubelets.now)  # type: ignore[arg-type]


async def test_a_lease_that_is_not_renewed_is_stale(leases: Leases, kubelets: Kubelets) -> None:
    kubelets.gone["silent"] = 0
    await kubelets.watch(leases, "silent", for_s=LIMIT_S)
    assert not leases.stale({"silent"}, "well")
    await kubelets.watch(leases, "silent", for_s=LIMIT_S // 2)
    assert leases.stale({"silent"}, "well") == {"silent"}


async def test_a_lease_that_is_renewed_is_never_stale(leases: Leases, kubelets: Kubelets) -> None:
    await kubelets.watch(leases, "silent", for_s=5 * LIMIT_S)
    assert not leases.stale({"silent"}, "well")


async def test_when_the_witness_is_not_renewed_either_it_is_the_cluster_that_stands_still(
    leases: Leases, kubelets: Kubelets
) -> None:
    kubelets.gone |= {"silent": 0, "well": 0}
    await kubelets.watch(leases, "silent", for_s=5 * LIMIT_S)
    assert not leases.stale({"silent"}, "well")


@pytest.mark.parametrize("phase", [1, 3, 7, 9])
@pytest.mark.parametrize("stopped", range(20, 32))
async def test_leases_that_nobody_can_renew_any_more_are_not_stale(
    leases: Leases, kubelets: Kubelets, stopped: int, phase: int
) -> None:
    """The API server takes no writes, though it answers; the witness may have had its turn shortly before that."""
    kubelets.gone = {"silent": stopped, "well": stopped}
    kubelets.phases["well"] = phase
    for _ in range(3 * LIMIT_S):
        await kubelets.watch(leases, "silent", for_s=1)
        assert not leases.stale({"silent"}, "well")


@pytest.mark.parametrize("phase", range(10))
async def test_whenever_a_witness_has_its_turn_a_lease_is_stale_soon(
    leases: Leases, kubelets: Kubelets, phase: int
) -> None:
    kubelets.gone["silent"] = 0
    kubelets.phases["well"] = phase
    await kubelets.watch(leases, "silent", for_s=LIMIT_S + 8)
    assert leases.stale({"silent"}, "well")


async def test_an_answer_that_comes_late_makes_no_lease_older(leases: Leases, kubelets: Kubelets) -> None:
    kubelets.phases["well"] = 9
    await leases.look({"silent"}, "well", kubelets.now)
    kubelets.now, kubelets.slow_s = 9, {"silent": 11}
    await leases.look({"silent"}, "well", kubelets.now)
    for moment in (20, 23, 26, 29):  # it was renewed at 20, and is due at 30
        kubelets.now = moment
        await leases.look({"silent"}, "well", kubelets.now)
        assert not leases.stale({"silent"}, "well")


async def test_kubelets_that_renew_less_often_have_more_time(leases: Leases, kubelets: Kubelets) -> None:
    kubelets.duration_s, kubelets.phases["well"] = 160, 25
    for _ in range(200):
        await kubelets.watch(leases, "silent", for_s=1)
        assert not leases.stale({"silent"}, "well")
    kubelets.gone["silent"] = 200
    await kubelets.watch(leases, "silent", for_s=160)
    assert leases.stale({"silent"}, "well")


async def test_time_in_which_nobody_looked_makes_no_lease_stale(leases: Leases, kubelets: Kubelets) -> None:
    """The API server was away, or this process stood still: kubelets could not renew, or need not have been seen."""
    kubelets.gone["silent"] = 0
    await kubelets.watch(leases, "silent", for_s=5)
    kubelets.refusal = ApiError(0, "", "away")
    await kubelets.watch(leases, "silent", for_s=5 * LIMIT_S)
    kubelets.refusal = None
    await kubelets.watch(leases, "silent", for_s=LIMIT_S // 2)
    assert not leases.stale({"silent"}, "well")


async def test_without_a_witness_or_the_right_nothing_is_asked_for_again(leases: Leases, kubelets: Kubelets) -> None:
    await kubelets.watch(leases, "silent", for_s=LIMIT_S, witness=None)
    assert kubelets.asked == []
    kubelets.refusal = ApiError(403, "Forbidden", "may not get leases")
    await kubelets.watch(leases, "silent", for_s=LIMIT_S)
    assert sorted(kubelets.asked) == ["silent", "well"]


async def judged(
    kubelets: Kubelets, ready: Mapping[str, bool], silent_s: losses.Silences, for_s: int
) -> tuple[losses.Judgement, CollectorRegistry, Judge]:
    judge = Judge(kubelets, 15, "gpus")  # type: ignore[arg-type]
    registry = CollectorRegistry()
    registry.register(judge)
    found = losses.Judgement()
    for _ in range(for_s):
        kubelets.now += 1
        found = await judge.judge(ready, silent_s, kubelets.now)
        if found.lost:
            break
    return found, registry, judge


async def test_a_silent_machine_is_lost_by_its_lease_before_kubernetes_says_not_ready(kubelets: Kubelets) -> None:
    kubelets.gone["silent"] = 0
    found, registry, judge = await judged(kubelets, {"silent": True, "well": True}, {"silent": [30], "well": [1]}, 40)
    assert found.lost == {"silent"}
    assert kubelets.now < 30
    assert judge.gone == {"silent"}
    assert registry.get_sample_value("trainyard_launcher_machines_lost_total", {"pool": "gpus"}) == 1


async def test_no_pod_is_sent_to_a_lost_machine_until_kubernetes_knows_or_it_is_back(kubelets: Kubelets) -> None:
    kubelets.gone["silent"] = 0
    ready = {"silent": True, "well": True}
    _, _, judge = await judged(kubelets, ready, {"silent": [30]}, 40)
    for _ in range(60):  # its pods have been given up
        kubelets.now += 1
        await judge.judge(ready, {}, kubelets.now)
    assert judge.gone == {"silent"}
    await judge.judge(ready | {"silent": False}, {}, kubelets.now)
    assert judge.gone == frozenset()
    _, _, judge = await judged(kubelets, ready, {"silent": [30]}, 40)
    kubelets.gone.clear()
    for _ in range(10):
        kubelets.now += 1
        await judge.judge(ready, {}, kubelets.now)
    assert judge.gone == frozenset()


async def test_a_machine_that_joins_is_no_reason_to_trust_a_lost_one_again(kubelets: Kubelets) -> None:
    kubelets.gone["silent"] = 0
    ready = {"silent": True, "well": True}
    _, _, judge = await judged(kubelets, ready, {"silent": [30]}, 40)
    for _ in range(30):
        kubelets.now += 1
        await judge.judge(ready | {"another": True}, {}, kubelets.now)
        assert judge.gone == {"silent"}


async def test_time_in_which_this_process_stood_still_is_nobodys_silence(kubelets: Kubelets) -> None:
    ready = {"one": False, "two": True}
    _, _, judge = await judged(kubelets, ready, {"one": [1]}, 10)
    kubelets.now += 60  # what agents said meanwhile is not read yet
    for _ in range(14):
        kubelets.now += 1
        assert await judge.judge(ready, {"one": [kubelets.now]}, kubelets.now) == losses.Judgement()
    kubelets.now += 2
    assert (await judge.judge(ready, {"one": [kubelets.now]}, kubelets.now)).lost == {"one"}


async def test_a_machine_that_was_never_seen_is_not_lost_but_new(kubelets: Kubelets) -> None:
    silent_s = {"new": [99.0], "old": [1.0]}
    found, _, judge = await judged(kubelets, {"old": True, "other": True}, silent_s, 10)
    assert found == losses.Judgement()
    await judge.judge({"old": True, "other": True, "new": True}, silent_s, kubelets.now)
    found = await judge.judge({"old": True, "other": True}, silent_s, kubelets.now)
    assert found.lost == {"new"}


def test_a_template_stays_as_it_is_when_pods_are_kept_away_from_machines() -> None:
    terms = [{"matchExpressions": [{"key": "gpu", "operator": "Exists"}]}]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    template = {"spec": {"affinity": {"nodeAffinity": required}}}
    before = copy.deepcopy(template)
    placement.avoid(merged({"spec": {}}, template)["spec"], {"lost"})
    assert template == before


def test_a_pod_is_kept_away_from_machines_whatever_else_is_wished_for() -> None:
    terms = [{"matchExpressions": [{"key": "gpu", "operator": "Exists"}]}, {}]
    wish = {
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}
    }
    plain: dict[str, Any] = {}
    for spec in (wish, plain):
        placement.avoid(spec, {"b", "a"})
        required = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        for term in required["nodeSelectorTerms"]:
            assert [each["values"] for each in term["matchFields"]] == [["a"], ["b"]]
    untouched: dict[str, Any] = {}
    placement.avoid(untouched, ())
    assert untouched == {}


async def test_a_silent_machine_whose_kubelet_is_well_is_not_lost(kubelets: Kubelets) -> None:
    found, _, _ = await judged(kubelets, {"silent": True, "well": True}, {"silent": [30], "well": [1]}, 100)
    assert found == losses.Judgement()


async def test_nothing_is_asked_while_all_agents_are_heard(kubelets: Kubelets) -> None:
    await judged(kubelets, {"silent": True, "well": True}, {"silent": [5], "well": [1]}, 100)
    assert kubelets.asked == []


async def test_when_most_machines_seem_lost_at_once_they_are_held_and_counted(kubelets: Kubelets) -> None:
    ready = {f"m{index}": index == 0 for index in range(4)}
    silent_s = {name: [1.0 if well else 99.0] for name, well in ready.items()}
    found, registry, _ = await judged(kubelets, ready, silent_s, 1)
    assert (found.lost, found.held) == (frozenset(), {"m1", "m2", "m3"})
    assert registry.get_sample_value("trainyard_launcher_machines_held", {"pool": "gpus"}) == 3


async def test_when_most_machines_fall_silent_at_once_no_lease_counts(kubelets: Kubelets) -> None:
    ready = {f"m{index}": True for index in range(4)}
    kubelets.gone = {f"m{index}": 0 for index in range(1, 4)}
    found, _, _ = await judged(kubelets, ready, {name: [1.0 if name == "m0" else 99.0] for name in ready}, 100)
    assert found == losses.Judgement()
    assert kubelets.asked == []


# What others take


def container(name: str = "main", **requests: str) -> dict[str, Any]:
    return {"name": name, "resources": {"requests": requests}}


def test_a_pod_of_somebody_else_takes_what_its_containers_ask_for() -> None:
    spec = {
        "nodeName": "node-1",
        "containers": [container(cpu="500m", memory="1Gi"), {"name": "plain"}],
        "initContainers": [
            container("greedy", memory="3Gi"),
            container("sidecar", cpu="250m") | {"restartPolicy": "Always"},
        ],
        "overhead": {"cpu": "10m"},
    }
    taken = foreign.read({"spec": spec})
    assert taken.machine == "node-1"
    assert taken.amounts == pytest.approx({"cpu": 0.76, "memory": 3 * 2**30, "pods": 1})


def test_a_container_that_has_limits_alone_asks_for_them() -> None:
    gpus = {"name": "main", "resources": {"limits": {"nvidia.com/gpu": "2"}}}
    assert foreign.read({"spec": {"nodeName": "one", "containers": [gpus]}}).amounts == {"nvidia.com/gpu": 2, "pods": 1}


@pytest.mark.parametrize(("kind", "resident"), [("DaemonSet", True), ("Node", True), ("ReplicaSet", False)])
def test_pods_that_belong_to_their_machine_are_told_from_those_that_may_go(kind: str, resident: bool) -> None:
    pod = {"metadata": {"ownerReferences": [{"kind": kind}]}, "spec": {"nodeName": "one", "containers": []}}
    assert foreign.read(pod).resident == resident


def amounts_of(resources: common_pb2.Resources) -> tuple[float, int, int]:
    return resources.cpu, resources.memory_bytes, resources.gpu


def node(name: str = "one", *, ready: bool = True, **spec: Any) -> machines.Machine:
    amounts = {"cpu": "4", "memory": "8Gi", "nvidia.com/gpu": "4", "pods": "110"}
    status = {"conditions": [{"type": "Ready", "status": str(ready)}], "allocatable": amounts}
    return machines.read({"metadata": {"name": name, "labels": {"host": name}}, "spec": spec, "status": status})


def test_machines_offer_what_others_leave_and_tell_what_guests_have() -> None:
    settings = Settings()
    guests = foreign.total([foreign.Taken("one", {"cpu": 1, "nvidia.com/gpu": 1}), foreign.Taken("one", {"cpu": 0.5})])
    [offered], _ = machines.offered([node()], settings, {"one": {"cpu": 0.5, "pods": 7}}, guests)
    assert amounts_of(offered.total) == (2, 2**33, 3)
    assert amounts_of(offered.others) == (1.5, 0, 1)
    assert offered.total.pods == 103
    greedy = {"one": {"cpu": 9, "memory": 2**40, "nvidia.com/gpu": 9}}
    [full], _ = machines.offered([node()], settings, guests=greedy)
    assert (amounts_of(full.total), amounts_of(full.others)) == ((0, 0, 0), (4, 2**33, 4))
    [nothing], _ = machines.offered([node()], settings, greedy, greedy)
    assert amounts_of(nothing.total) == (0, 0, 0)
    assert not nothing.HasField("others")


def test_machines_announce_labels_and_the_taints_that_no_template_tolerates() -> None:
    taints = [{"key": key, "value": "x", "effect": "NoSchedule"} for key in ("ours", "theirs")]
    template = {"tolerations": [{"key": "ours", "operator": "Exists"}]}
    [offered], _ = machines.offered([node(taints=taints)], Settings(), template=template)
    assert dict(offered.labels) == {"host": "one"}
    assert [(each.key, each.value, each.effect) for each in offered.taints] == [("theirs", "x", "NoSchedule")]


def test_machines_that_take_nothing_now_are_told_apart() -> None:
    pressure = {"key": "node.kubernetes.io/memory-pressure", "effect": "NoSchedule"}
    nodes = [node(), node("gone", ready=False), node("cordoned", unschedulable=True), node("full", taints=[pressure])]
    usable, unusable = machines.offered(nodes, Settings())
    assert [each.name for each in usable] == ["one"]
    assert [each.name for each in unusable] == ["cordoned", "full", "gone"]
    assert not any(each.taints for each in unusable)


def test_a_cordoned_machine_keeps_the_taints_of_its_own_alone() -> None:
    """`kubectl cordon` adds a taint, which no job has to tolerate: it waits until the machine can be used again."""
    own = {"key": "team", "value": "vision", "effect": "NoSchedule"}
    cordoned = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
    usable, [machine] = machines.offered([node(unschedulable=True, taints=[own, cordoned])], Settings())
    assert usable == []
    assert [each.key for each in machine.taints] == ["team"]


def affinity(**term: Any) -> dict[str, Any]:
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
    return {"affinity": {"nodeAffinity": required}}


@pytest.mark.parametrize(
    ("template", "names"),
    [
        ({}, ["one", "two"]),
        ({"nodeSelector": {"host": "two"}}, ["two"]),
        (affinity(matchExpressions=[{"key": "host", "operator": "NotIn", "values": ["two"]}]), ["one"]),
        (affinity(matchExpressions=[{"key": "host", "operator": "DoesNotExist"}]), []),
        (affinity(matchFields=[{"key": "metadata.name", "operator": "In", "values": ["two"]}]), ["two"]),
    ],
)
def test_machines_to_which_the_template_lets_no_pod_go_are_none_of_the_pool(
    template: dict[str, Any], names: list[str]
) -> None:
    usable, unusable = machines.offered([node("one"), node("two")], Settings(), template=template)
    assert [each.name for each in usable] == names
    assert unusable == []


def test_each_pod_takes_what_its_agent_and_the_template_ask_for_beside_the_job() -> None:
    settings = Settings(identity="here")
    plain = foreign.read(manifests.overhead("yard:1", settings)).amounts
    assert plain == pytest.approx({"cpu": 0.05, "memory": 96 * 2**20, "pods": 1})
    sidecar = {"spec": {"containers": [{"name": "logs", "resources": {"requests": {"cpu": "100m"}}}]}}
    assert foreign.read(manifests.overhead("yard:1", settings, sidecar)).amounts["cpu"] == pytest.approx(0.15)


# What a pod's status means


def status_of(status: dict[str, Any]) -> pods.Pod:
    labels = {"trainyard.dev/attempt-id": "a1", "batch.kubernetes.io/job-completion-index": "0"}
    found = pods.read({"metadata": {"name": "p", "uid": "u", "labels": labels}, "spec": {}, "status": status})
    assert found is not None
    return found


def test_a_claim_that_is_not_there_is_a_matter_of_volumes() -> None:
    message = '0/2 nodes are available: persistentvolumeclaim "sets" not found. preemption: none.'
    condition = {"type": "PodScheduled", "status": "False", "message": message}
    trouble = status_of({"phase": "Pending", "conditions": [condition]}).trouble
    assert trouble is not None
    assert trouble.reason == "VolumeUnavailable"
    assert "spec.kubernetes.volumes" in trouble.message


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ('Usage of EmptyDir volume "scratch" exceeds the limit "1Mi". ', "raise the sizeLimit"),
        ("Pod ephemeral local storage usage exceeds the total limit of containers 1Gi. ", "raise the sizeLimit"),
        ("The node was low on resource: memory. ", "the cluster needed its place"),
    ],
)
def test_an_eviction_says_whether_the_pod_was_over_a_limit_of_its_own(message: str, words: str) -> None:
    cause = status_of({"phase": "Failed", "reason": "Evicted", "message": message}).cause
    assert cause is not None
    assert cause.reason == "Evicted"
    assert words in cause.message
