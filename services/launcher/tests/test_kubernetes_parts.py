"""What the Kubernetes backend makes of a launch, and of what a cluster says. `tests/cluster` has the real cluster."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Set
from typing import Any

import pytest
from trainyard.spec import Kubernetes, Resources, Secret, SecretKeyReference, SecretSource, Spec, Toleration, Volume
from trainyard_launcher.backend import Facts, Launch, StartError
from trainyard_launcher.backends.kubernetes import jobs, losses, machines, manifests, names, pods, taints
from trainyard_launcher.backends.kubernetes.merge import merged, read_template
from trainyard_launcher.settings import Settings
from trainyard_protos.v1 import common_pb2

SETTINGS = Settings(
    backend="kubernetes",
    identity="platform-yard",
    agent_cpu=0.5,
    agent_memory=2**20,
    kubernetes_allowed_priority_classes="training-*",
    kubernetes_allowed_tolerations="gpu,team/*",
)


def launch(
    *,
    nodes: int = 1,
    workers: int = 1,
    gpu: int = 0,
    name: str = "digits",
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
    **spec: Any,
) -> Launch:
    facts = Facts("default", "job-1", name, "0198c0de-0000-7000-8000-00123456789a", 3, nodes, workers, 30)
    per_worker = common_pb2.Resources(cpu=1.5, memory_bytes=2**30, gpu=gpu)
    return Launch(
        facts, [], per_worker, spec=Spec(command=("true",), **spec), labels=labels or {}, annotations=annotations or {}
    )


def pod_spec(**wishes: Any) -> dict[str, Any]:
    job = manifests.job(launch(**wishes), "yard:1", SETTINGS)
    found: dict[str, Any] = job["spec"]["template"]["spec"]
    return found


# What an attempt becomes


def test_an_attempt_is_an_indexed_job_that_makes_each_pod_once() -> None:
    job = manifests.job(launch(nodes=4), "yard:1", SETTINGS)
    spec = job["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 4, 4)
    assert (spec["backoffLimit"], spec["podReplacementPolicy"]) == (0, "Failed")
    assert spec["template"]["spec"]["restartPolicy"] == "Never"


def test_a_job_carries_the_facts_it_is_found_again_by() -> None:
    wanted = launch(nodes=2)
    job = manifests.job(wanted, "yard:1", SETTINGS)
    assert names.facts_of(job["metadata"]) == wanted.facts
    assert job["metadata"]["labels"][names.POOL] == SETTINGS.pool
    assert job["spec"]["template"]["metadata"]["labels"][names.ATTEMPT_ID] == wanted.facts.attempt_id


@pytest.mark.parametrize("name", ["digits", "3d-model", "x" * 63, "a.b_c"])
def test_names_fit_into_a_host_name_with_the_index(name: str) -> None:
    made = names.object_name(launch(name=name).facts)
    assert made.endswith("-00123456789a")
    assert len(f"{made}-1023") <= 63
    assert made[0].isalpha()
    assert set(made) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")


def test_several_nodes_find_rank_0_by_the_name_of_its_pod() -> None:
    assert manifests.master("digits-1", 2) == "digits-1-0.digits-1"
    assert manifests.master("digits-1", 1) == "127.0.0.1"
    assert pod_spec(nodes=2)["subdomain"] == names.object_name(launch().facts)
    assert "subdomain" not in pod_spec(nodes=1)


def test_the_service_belongs_to_the_job_and_names_pods_before_they_are_ready() -> None:
    job = manifests.job(launch(nodes=2), "yard:1", SETTINGS)
    job["metadata"]["uid"] = "uid-1"
    service = manifests.service(job)
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert [each["uid"] for each in service["metadata"]["ownerReferences"]] == ["uid-1"]


def test_pods_of_an_attempt_and_no_others_reach_each_other() -> None:
    job = manifests.job(launch(nodes=2), "yard:1", SETTINGS)
    job["metadata"]["uid"] = "uid-1"
    policy = manifests.network_policy(job)
    selected = policy["spec"]["podSelector"]
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": selected}]}]
    assert selected["matchLabels"].items() <= job["spec"]["template"]["metadata"]["labels"].items()
    assert selected["matchLabels"] == {names.ATTEMPT_ID: launch().facts.attempt_id}
    assert [each["uid"] for each in policy["metadata"]["ownerReferences"]] == ["uid-1"]


def test_a_pod_asks_for_its_workers_and_the_agent() -> None:
    resources = pod_spec(workers=2, gpu=1)["containers"][0]["resources"]
    amount = {"memory": str(2 * 2**30 + 2**20), "nvidia.com/gpu": 2}
    assert resources["requests"] == amount | {"cpu": "3500m"}
    assert resources["limits"] == amount | {"cpu": "4000m"}, "the agent starts in a burst"


def test_pods_keep_to_the_restricted_standard() -> None:
    spec = pod_spec()
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    for container in spec["initContainers"] + spec["containers"]:
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_the_token_of_a_pod_is_short_lived_and_for_the_yard_alone() -> None:
    [identity] = [each for each in pod_spec()["volumes"] if each["name"] == "trainyard-identity"]
    token = identity["projected"]["sources"][0]["serviceAccountToken"]
    assert token == {"audience": "trainyard", "expirationSeconds": 600, "path": "token"}


def test_wishes_of_a_job_reach_its_pods() -> None:
    spec = pod_spec(
        image="team/train:1",
        secrets=(Secret(name="KEY", from_=SecretSource(secret=SecretKeyReference(name="s", key="k"))),),
        resources=Resources(),
        kubernetes=Kubernetes(
            node_selector={"gpu": "a100"},
            tolerations=(Toleration(key="gpu", operator="Exists"),),
            volumes=(Volume(name="data", mount_path="/data", read_only=True, persistent_volume_claim="sets"),),
            shared_memory="1Gi",
            service_account="trainer",
            pull_secrets=("registry",),
            pull_policy="Always",
            topology="spread",
            run_as_user=42,
        ),
    )
    worker = spec["containers"][0]
    assert (worker["image"], worker["imagePullPolicy"]) == ("team/train:1", "Always")
    assert {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}} in worker["env"]
    assert {"name": "data", "mountPath": "/data", "readOnly": True} in worker["volumeMounts"]
    assert {"name": "data", "persistentVolumeClaim": {"claimName": "sets", "readOnly": True}} in spec["volumes"]
    assert {"name": "trainyard-shm", "emptyDir": {"medium": "Memory", "sizeLimit": str(2**30)}} in spec["volumes"]
    assert spec["nodeSelector"] == {"gpu": "a100"}
    assert spec["tolerations"] == [{"key": "gpu", "operator": "Exists"}]
    assert spec["serviceAccountName"] == "trainer"
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    assert spec["topologySpreadConstraints"][0]["topologyKey"] == "kubernetes.io/hostname"
    assert spec["securityContext"]["runAsUser"] == 42


def test_shared_memory_is_as_large_as_the_memory_of_the_workers_unless_the_job_sets_it() -> None:
    spec = pod_spec(workers=2)
    [volume] = [each for each in spec["volumes"] if each["name"] == "trainyard-shm"]
    assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": str(2 * 2**30)}
    assert {"name": "trainyard-shm", "mountPath": "/dev/shm"} in spec["containers"][0]["volumeMounts"]


def test_objects_of_a_job_carry_its_labels_but_none_that_kubernetes_or_the_yard_selects_by() -> None:
    own = {"team": "vision", "example.com/cost-centre": "7", "kubernetes.io.example/a": "b"}
    others = {
        "app.kubernetes.io/component": "gateway",
        "batch.kubernetes.io/job-completion-index": "5",
        "kubernetes.io/os": "linux",
        "pod.k8s.io/x": "y",
        "trainyard.dev/attempt-id": "another",
        "job-name": "another",
        "controller-uid": "another",
    }
    job = manifests.job(launch(labels=own | others), "yard:1", SETTINGS)
    yards = names.labels(launch().facts, SETTINGS.pool, SETTINGS.identity)
    assert job["metadata"]["labels"] == own | yards
    assert job["spec"]["template"]["metadata"]["labels"] == own | yards


def test_objects_of_a_job_carry_its_annotations_beside_the_yards_own() -> None:
    own, others = {"example.com/cost-centre": "a 7"}, {"trainyard.dev/facts": "{}", "kubernetes.io/description": "x"}
    job = manifests.job(launch(annotations=own | others), "yard:1", SETTINGS)
    assert job["spec"]["template"]["metadata"]["annotations"] == own
    assert job["metadata"]["annotations"] == own | {names.FACTS: names.facts_to(launch().facts)}


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        ({"priority_class": "system-node-critical"}, "priorityClass: 'system-node-critical' is not allowed"),
        ({"priority_class": "system-node-critical"}, r"allowed: training-\*"),
        ({"tolerations": (Toleration(operator="Exists"),)}, r"tolerations\[0\]: tolerates every taint"),
        (
            {"tolerations": (Toleration(key="gpu"), Toleration(key="node-role.kubernetes.io/control-plane"))},
            r"tolerations\[1\].key: 'node-role.kubernetes.io/control-plane' is not allowed.*; allowed: gpu, team/\*",
        ),
    ],
)
def test_a_job_gets_no_priority_class_and_tolerates_no_taint_that_is_not_allowed(wishes: Any, words: str) -> None:
    with pytest.raises(StartError, match=words) as refused:
        manifests.job(launch(kubernetes=Kubernetes(**wishes)), "yard:1", SETTINGS)
    assert refused.value.reason == "NotAllowed"


def test_nothing_is_allowed_by_default_and_everything_with_a_star() -> None:
    asked = Kubernetes(priority_class="training-low", tolerations=(Toleration(operator="Exists"),))
    with pytest.raises(StartError, match=r"priorityClass.*allowed: none.*tolerations.*allowed: none"):
        manifests.job(launch(kubernetes=asked), "yard:1", Settings(backend="kubernetes"))
    stars = {"kubernetes_allowed_priority_classes": "*", "kubernetes_allowed_tolerations": "*"}
    job = manifests.job(launch(kubernetes=asked), "yard:1", SETTINGS.model_copy(update=stars))
    spec = job["spec"]["template"]["spec"]
    assert (spec["priorityClassName"], spec["tolerations"]) == ("training-low", [{"operator": "Exists"}])


def test_a_folder_of_the_node_is_refused_unless_the_yard_allows_it() -> None:
    wanted = launch(kubernetes=Kubernetes(volumes=(Volume(name="data", mount_path="/data", host_path="/srv"),)))
    with pytest.raises(StartError, match="KUBERNETES_HOST_PATHS"):
        manifests.job(wanted, "yard:1", SETTINGS)
    allowed = manifests.job(wanted, "yard:1", SETTINGS.model_copy(update={"kubernetes_host_paths": True}))
    assert {"name": "data", "hostPath": {"path": "/srv"}} in allowed["spec"]["template"]["spec"]["volumes"]


YARDS_OWN = {"kubernetes_reserved_names": "yard-*,home-yard-*", "kubernetes_service_account": "yard-job"}
KEY = SecretSource(secret=SecretKeyReference(name="yard-attempt-key", key="attempt.key"))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"secrets": (Secret(name="KEY", from_=KEY),)}, "spec.secrets[0].from.secret: 'yard-attempt-key'"),
        (
            {"kubernetes": Kubernetes(volumes=(Volume(name="v", mount_path="/v", secret="yard-tls"),))},
            "spec.kubernetes.volumes[0].secret: 'yard-tls'",
        ),
        (
            {
                "kubernetes": Kubernetes(
                    volumes=(Volume(name="v", mount_path="/v", persistent_volume_claim="home-yard-metrics-0"),)
                )
            },
            "spec.kubernetes.volumes[0].persistentVolumeClaim: 'home-yard-metrics-0'",
        ),
        ({"kubernetes": Kubernetes(pull_secrets=("yard-token",))}, "spec.kubernetes.pullSecrets[0]: 'yard-token'"),
        (
            {"kubernetes": Kubernetes(service_account="yard-launcher")},
            "spec.kubernetes.serviceAccount: 'yard-launcher'",
        ),
    ],
)
def test_what_is_the_yards_own_no_job_may_name(asked: dict[str, Any], said: str) -> None:
    settings = SETTINGS.model_copy(update=YARDS_OWN)
    with pytest.raises(StartError, match=re.escape(f"{said} belongs to the yard itself")):
        manifests.job(launch(**asked), "yard:1", settings)


def test_the_account_that_is_there_for_jobs_may_be_named() -> None:
    wanted = launch(kubernetes=Kubernetes(service_account="yard-job"))
    manifests.job(wanted, "yard:1", SETTINGS.model_copy(update=YARDS_OWN))


def test_workers_have_their_grace_period_before_kubernetes_kills_them() -> None:
    assert pod_spec()["terminationGracePeriodSeconds"] >= 2 * 30


@pytest.mark.parametrize("grace_s", [0, 3, 10, 30, 600])
def test_the_workers_share_is_found_again_in_the_pods_grace_period(grace_s: float) -> None:
    assert manifests.grace_within(manifests._grace_s(grace_s)) == grace_s


# The template of whoever runs the yard


def test_a_template_adds_changes_and_removes_by_name() -> None:
    base = {
        "spec": {
            "containers": [{"name": "worker", "env": [{"name": "A", "value": "1"}]}],
            "initContainers": [{"name": "agent"}],
            "tolerations": [{"key": "a"}],
            "priorityClassName": "low",
        }
    }
    patch = {
        "metadata": {"labels": {"team": "vision"}},
        "spec": {
            "containers": [{"name": "worker", "env": [{"name": "A", "value": "2"}, {"name": "B", "value": "3"}]}],
            "initContainers": [{"name": "agent", "$patch": "delete"}],
            "tolerations": [{"key": "b"}],
            "priorityClassName": None,
        },
    }
    assert merged(base, patch) == {
        "metadata": {"labels": {"team": "vision"}},
        "spec": {
            "containers": [{"name": "worker", "env": [{"name": "A", "value": "2"}, {"name": "B", "value": "3"}]}],
            "initContainers": [],
            "tolerations": [{"key": "a"}, {"key": "b"}],
        },
    }


def test_a_template_that_is_none_is_refused_by_name(tmp_path) -> None:
    file = tmp_path / "pod.yaml"
    file.write_text("containers: []")
    with pytest.raises(ValueError, match=r"pod\.yaml: expected a mapping with metadata and spec"):
        read_template(str(file))


# What a pod's status means


LIMITS = {"cpu": "1", "memory": "512Mi"}


def pod(status: dict[str, Any], **metadata: Any) -> pods.Pod:
    labels = {names.ATTEMPT_ID: "a1", names.INDEX: "1"}
    owner = {"controller": True, "kind": "Job", "uid": "job-uid"}
    found = pods.read(
        {
            "metadata": {"name": "p", "uid": "u", "labels": labels, "ownerReferences": [owner]} | metadata,
            "spec": {"nodeName": "node-1", "containers": [{"name": "worker", "resources": {"limits": LIMITS}}]},
            "status": status,
        }
    )
    assert found is not None
    return found


def terminated(**state: Any) -> dict[str, Any]:
    return {"phase": "Failed", "containerStatuses": [{"name": "worker", "state": {"terminated": state}}]}


def waiting(reason: str, message: str = "", container: str = "worker") -> dict[str, Any]:
    status = {"name": container, "image": "team/train:1", "state": {"waiting": {"reason": reason, "message": message}}}
    return {"phase": "Pending", "containerStatuses": [status]}


def test_the_record_of_an_agent_is_its_termination_message() -> None:
    ended = pod(terminated(exitCode=5, message=json.dumps({"reason": "WorkerFailed", "exit_code": 5})))
    assert ended.over
    assert ended.record is not None
    assert (ended.record.reason, ended.record.exit_code) == ("WorkerFailed", 5)


@pytest.mark.parametrize(
    "message", ["", "Traceback (most recent call last)", "[1]", "{", '{"reason": 7}', '{"loss": 1}']
)
def test_what_is_no_record_is_none(message: str) -> None:
    assert pod(terminated(exitCode=1, message=message)).record is None


def test_a_pod_that_used_too_much_memory_says_so() -> None:
    ended = pod(terminated(exitCode=137, reason="OOMKilled"))
    assert ended.out_of_memory
    assert ended.cause is not None
    assert ended.cause.reason == "OutOfMemory"
    assert "spec.resources.memory" in ended.cause.message
    assert ended.memory_limit == 2**29


UNSCHEDULABLE = {
    "phase": "Pending",
    "conditions": [
        {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": "0/2 nodes are available: 2 Insufficient cpu.",
        }
    ],
}


@pytest.mark.parametrize(
    ("status", "reason", "words"),
    [
        (UNSCHEDULABLE, "Unschedulable", "2 Insufficient cpu"),
        (waiting("ImagePullBackOff", "Back-off pulling image"), "ImageUnavailable", "team/train:1"),
        (waiting("ErrImagePull", "not found"), "ImageUnavailable", "spec.image"),
        (waiting("CreateContainerConfigError", 'secret "s" not found'), "VolumeUnavailable", 'secret "s" not found'),
        (waiting("CreateContainerError", "no such device"), "StartFailed", "no such device"),
    ],
)
def test_what_keeps_a_pod_from_running_has_a_typed_reason(status: dict[str, Any], reason: str, words: str) -> None:
    trouble = pod(status).trouble
    assert trouble is not None
    assert trouble.reason == reason
    assert words in trouble.message


def test_a_pod_that_is_just_starting_has_no_trouble() -> None:
    assert pod(waiting("ContainerCreating")).trouble is None
    assert pod(waiting("PodInitializing")).trouble is None


def test_an_image_that_can_never_be_had_is_not_waited_for() -> None:
    hopeless = pod(waiting("InvalidImageName")).trouble
    patient = pod(waiting("ImagePullBackOff")).trouble
    assert hopeless is not None
    assert patient is not None
    assert (hopeless.hopeless, patient.hopeless) == (True, False)


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        ({"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."}, "Evicted"),
        (
            {"conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}]},
            "Evicted",
        ),
        ({"phase": "Failed", "reason": "OutOfcpu", "message": "Node didn't have enough resource"}, "Evicted"),
        # of one that ran until its kubelet was started again
        (terminated(exitCode=1) | {"phase": "Failed", "reason": "OutOfmemory"}, "Evicted"),
        (terminated(exitCode=128, reason="StartError", message="exec: no such file"), "StartFailed"),
    ],
)
def test_why_a_pod_ended_has_a_typed_reason(status: dict[str, Any], reason: str) -> None:
    cause = pod(status).cause
    assert cause is not None
    assert cause.reason == reason


def test_a_pod_that_somebody_deletes_says_so() -> None:
    cause = pod({"phase": "Running"}, deletionTimestamp="2026-01-01T00:00:00Z").cause
    assert cause is not None
    assert cause.reason == "PodDeleted"
    assert "yard cancel" in cause.message


def test_a_quota_that_lets_no_pod_be_made_is_told_with_its_words() -> None:
    event = {
        "involvedObject": {"kind": "Job", "name": "digits-1"},
        "reason": "FailedCreate",
        "message": 'Error creating: pods "digits-1-0-" is forbidden: exceeded quota: team',
    }
    warned = jobs.read_warning(event)
    assert warned is not None
    assert (warned.kind, warned.name, warned.trouble.reason) == ("Job", "digits-1", "PodsRefused")
    assert "exceeded quota: team" in warned.trouble.message


# Machines


def node(name: str = "node-1", *, ready: str = "True", **spec: Any) -> machines.Machine:
    amounts = {"cpu": "3920m", "memory": "8137Mi", "nvidia.com/gpu": "4", "pods": "110"}
    status = {"conditions": [{"type": "Ready", "status": ready}], "allocatable": amounts}
    return machines.read({"metadata": {"name": name}, "spec": spec, "status": status})


def test_machines_offer_what_pods_can_have() -> None:
    [offered], _ = machines.offered([node()], SETTINGS)
    assert offered.total.cpu == pytest.approx(3.92)
    assert (offered.total.memory_bytes, offered.total.gpu, offered.total.pods) == (8137 * 2**20, 4, 110)


@pytest.mark.parametrize(
    ("text", "amount"), [("1Pi", 2**50), ("2P", 2 * 10**15), ("3Ki", 3072), ("1500m", 1), ("2e3", 2000), ("7", 7)]
)
def test_memory_is_read_in_every_unit_of_kubernetes(text: str, amount: int) -> None:
    found = machines.read({"metadata": {"name": "one"}, "status": {"allocatable": {"memory": text}}})
    assert found.memory_bytes == amount


def test_machines_that_take_no_pods_are_not_offered() -> None:
    away = [
        node(ready="Unknown"),
        node(unschedulable=True),
        node(taints=[{"key": "node.kubernetes.io/unreachable", "effect": "NoSchedule"}]),
    ]
    assert machines.offered(away, SETTINGS)[0] == []


@pytest.mark.parametrize(
    ("taint", "toleration", "goes"),
    [
        ("pool=train:NoSchedule", {"key": "pool", "value": "train"}, True),
        ("pool=train:NoSchedule", {"key": "pool", "operator": "Equal", "value": "serve"}, False),
        ("pool=train:NoSchedule", {"key": "pool", "operator": "Exists"}, True),
        ("pool=train:NoSchedule", {"operator": "Exists"}, True),
        ("pool=train:NoExecute", {"key": "pool", "operator": "Exists", "effect": "NoSchedule"}, False),
        ("pool=:NoSchedule", {"key": "pool"}, True),
        ("pool=train:PreferNoSchedule", {"key": "other"}, True),
        ("pool=train:NoSchedule", {"key": "other", "operator": "Exists"}, False),
    ],
)
def test_machines_announce_no_taints_that_every_pod_tolerates(
    taint: str, toleration: dict[str, str], goes: bool
) -> None:
    key, _, rest = taint.partition("=")
    value, _, effect = rest.partition(":")
    machine = node(taints=[{"key": key, "value": value, "effect": effect}])
    [offered], _ = machines.offered([machine], SETTINGS, template={"tolerations": [toleration]})
    assert (not offered.taints) == goes


def test_machines_for_gpus_are_offered_and_pods_that_ask_for_some_go_there() -> None:
    machine = node(taints=[{"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}])
    assert machines.offered([machine], SETTINGS)[0][0].taints
    assert not taints.untolerated(machine.taints, pod_spec(gpu=1)["tolerations"])
    assert "tolerations" not in pod_spec()


def test_no_toleration_opens_a_cordoned_machine() -> None:
    taint = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
    cordoned = node(unschedulable=True, taints=[taint])
    assert machines.offered([cordoned], SETTINGS, template={"tolerations": [{"operator": "Exists"}]})[0] == []


def lost(ready: dict[str, bool], silent_s: losses.Silences) -> Set[str]:
    """By Kubernetes' word and the silence of agents alone."""
    return losses.judge(ready, frozenset(), silent_s, 15).lost


def test_a_machine_is_lost_when_it_is_not_ready_and_its_agents_are_silent_while_others_are_heard() -> None:
    ready = {"one": False, "two": True}
    assert lost(ready, {"one": [30, math.inf], "two": [1]}) == {"one"}


@pytest.mark.parametrize(
    ("ready", "silent"),
    [
        ({"one": True, "two": True}, {"one": [99], "two": [1]}),  # its kubelet is well: the agent's own trouble
        ({"one": False, "two": True}, {"one": [3], "two": [1]}),  # it trains on
        ({"one": False, "two": True}, {"one": [99], "two": [99]}),  # it is the launcher that hears nobody
        ({"one": False}, {"one": [99]}),  # no machine is ready: it is not the machines
    ],
)
def test_one_sign_alone_loses_no_machine(ready: dict[str, bool], silent: dict[str, list[float]]) -> None:
    assert not lost(ready, silent)


def test_a_machine_that_is_gone_counts_as_not_ready() -> None:
    assert lost({"two": True}, {"one": [99], "two": [1]}) == {"one"}


def test_when_most_machines_seem_lost_at_once_nobody_is_evicted() -> None:
    ready = {f"node-{index}": index >= 6 for index in range(10)}
    silent: dict[str, list[float]] = {name: [1.0 if well else 99.0] for name, well in ready.items()}
    assert not lost(ready, silent)
    ready["node-5"] = True
    assert lost(ready, silent) == {f"node-{index}" for index in range(5)}
