"""What an attempt is in a cluster: one Indexed Job, and a headless Service when its nodes have to find each other.

Pure: from a launch and the settings to the objects, as the API server takes them. Retries belong to the scheduler, so
the Job makes each pod once. Pods keep to the restricted standard of pod security.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from servicekit.ownership import ENDPOINT_VARIABLE
from trainyard.spec import Kubernetes, Spec, quantities
from trainyard.spec.cluster import Toleration, Volume
from trainyard_protos.v1 import common_pb2

from trainyard_launcher.backend import Facts, Launch, StartError
from trainyard_launcher.backends.kubernetes import allowed, names, reserved, taints
from trainyard_launcher.backends.kubernetes.merge import merged
from trainyard_launcher.settings import Settings

Object = dict[str, Any]

AUDIENCE = "trainyard"
AGENT = "agent"
AGENT_VOLUME = "trainyard-agent"
AGENT_FOLDER = "/opt/trainyard"
NODE_FOLDER = "/trainyard/node"
STATE_FOLDER = "/trainyard/cache"
MASTER_PORT = 29500
WORKER = "worker"
_IDENTITY = "/var/run/trainyard"
_TOKEN_S = 600
_LEAST_DRAIN_S, _GOODBYE_S = 10, 10
_KEEP_ENDED_S = 7 * 86_400  # the launcher removes what ended; this is for a launcher that never comes back


def job(
    launch: Launch,
    endpoint: str,
    settings: Settings,
    template: Mapping[str, Any] | None = None,
    *,
    agent_mounted: bool = False,
) -> Object:
    """The Job of an attempt.

    Args:
        endpoint: host:port at which pods reach the yard.
        template: merged into the pod; see `merge`.
        agent_mounted: the agent's image is mounted; otherwise an init container copies what it holds.

    Raises:
        StartError: the job asks for something that is not allowed here.
    """
    facts = launch.facts
    if launch.spec is not None:
        reserved.check(launch.spec, settings)
        allowed.check(launch.spec, settings)
    labels = names.users_own(launch.labels) | names.labels(facts, settings.pool, settings.identity)
    annotations = names.users_own(launch.annotations)
    pod = {
        "metadata": {"labels": labels, "annotations": annotations},
        "spec": _pod_spec(launch, endpoint, settings, agent_mounted=agent_mounted),
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": names.object_name(facts),
            "labels": labels,
            "annotations": annotations | {names.FACTS: names.facts_to(facts)},
        },
        "spec": {
            "completionMode": "Indexed",
            "completions": facts.nodes,
            "parallelism": facts.nodes,
            "backoffLimit": 0,
            "podReplacementPolicy": "Failed",
            "ttlSecondsAfterFinished": _KEEP_ENDED_S,
            "template": merged(pod, template or {}),
        },
    }


def overhead(
    endpoint: str, settings: Settings, template: Mapping[str, Any] | None = None, *, agent_mounted: bool = False
) -> Object:
    """A pod of a job that asks for nothing: what it requests, each pod requests beside what its job asks for."""
    facts = Facts("", "", "job", "0", 0, 1, 1, 0)
    nothing = Launch(facts, [], common_pb2.Resources(), spec=Spec(command=("true",)))
    made: Object = job(nothing, endpoint, settings, template, agent_mounted=agent_mounted)["spec"]["template"]
    return made


def service(job_object: Mapping[str, Any]) -> Object:
    """The Service that gives the pods of a Job names, before they are ready; it goes when the Job goes."""
    metadata = job_object["metadata"]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _belonging_to(metadata),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": metadata["name"]},
        },
    }


def network_policy(job_object: Mapping[str, Any]) -> Object:
    """Lets the pods of a Job reach each other, all ports of them; it goes when the Job goes."""
    metadata = job_object["metadata"]
    pods = {"podSelector": {"matchLabels": {names.ATTEMPT_ID: metadata["labels"][names.ATTEMPT_ID]}}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _belonging_to(metadata),
        "spec": pods | {"policyTypes": ["Ingress"], "ingress": [{"from": [pods]}]},
    }


def _belonging_to(job_metadata: Mapping[str, Any]) -> Object:
    name, uid = job_metadata["name"], job_metadata["uid"]
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": uid}
    return {"name": name, "labels": job_metadata["labels"], "ownerReferences": [owner]}


def master(name: str, nodes: int) -> str:
    """Where rank 0 is, for the workers."""
    return f"{name}-0.{name}" if nodes > 1 else "127.0.0.1"


def _pod_spec(launch: Launch, endpoint: str, settings: Settings, *, agent_mounted: bool) -> Object:
    facts, spec = launch.facts, launch.spec or Spec(command=("true",))
    wishes = spec.kubernetes or Kubernetes()
    user = wishes.run_as_user or settings.kubernetes_run_as_user
    group = wishes.run_as_group or settings.kubernetes_run_as_group
    pod: Object = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "serviceAccountName": wishes.service_account or settings.kubernetes_service_account,
        "terminationGracePeriodSeconds": _grace_s(facts.grace_s),
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": user,
            "runAsGroup": group,
            "fsGroup": wishes.fs_group or group,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "initContainers": [] if agent_mounted else [_agent_container(settings)],
        "containers": [_worker_container(launch, spec, wishes, endpoint, settings, agent_mounted=agent_mounted)],
        "volumes": [_agent_volume(settings, mounted=agent_mounted)]
        + _own_volumes(settings)
        + [_volume(each, settings) for each in wishes.volumes],
    }
    if facts.nodes > 1:
        pod["subdomain"] = names.object_name(facts)
    pod["volumes"].append(_shared_memory(launch, wishes))
    gpus = [taints.of_gpus(settings.kubernetes_gpu_resource)] if launch.per_worker.gpu else []
    return pod | _placement(wishes, facts.attempt_id, gpus)


def _placement(wishes: Kubernetes, attempt_id: str, tolerations: Sequence[taints.Toleration]) -> Object:
    """Where pods may and should go; only what is wished for, and tolerated beside."""
    nearby = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {names.ATTEMPT_ID: attempt_id}}}
    found: Object = {
        "nodeSelector": dict(wishes.node_selector),
        "tolerations": [*(_toleration(each) for each in wishes.tolerations), *tolerations],
        "imagePullSecrets": [{"name": name} for name in wishes.pull_secrets],
        "priorityClassName": wishes.priority_class,
    }
    if wishes.topology == "spread":
        found["topologySpreadConstraints"] = [{"maxSkew": 1, "whenUnsatisfiable": "ScheduleAnyway"} | nearby]
    elif wishes.topology == "pack":
        term = {"weight": 100, "podAffinityTerm": nearby}
        found["affinity"] = {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [term]}}
    return {name: value for name, value in found.items() if value}


def _toleration(wish: Toleration) -> Object:
    return wish.model_dump(by_alias=True, exclude_none=True)


def _agent_container(settings: Settings) -> Object:
    """Copies the agent, with an interpreter of its own, to where the worker's container sees it."""
    return {
        "name": AGENT,
        "image": settings.kubernetes_agent_image,
        "imagePullPolicy": settings.kubernetes_pull_policy,
        "args": ["/target"],
        "securityContext": _unprivileged() | {"readOnlyRootFilesystem": True},
        "resources": _resources(0, settings.agent_memory, settings),
        "volumeMounts": [{"name": AGENT_VOLUME, "mountPath": "/target"}],
    }


def _worker_container(
    launch: Launch, spec: Spec, wishes: Kubernetes, endpoint: str, settings: Settings, *, agent_mounted: bool
) -> Object:
    in_image = {"subPath": AGENT_FOLDER.strip("/")} if agent_mounted else {}
    mounts = [
        {"name": AGENT_VOLUME, "mountPath": AGENT_FOLDER, "readOnly": True} | in_image,
        {"name": "trainyard-node", "mountPath": NODE_FOLDER.rpartition("/")[0]},
        {"name": "trainyard-identity", "mountPath": _IDENTITY, "readOnly": True},
        {"name": "trainyard-shm", "mountPath": "/dev/shm"},
    ]
    mounts += [
        {"name": each.name, "mountPath": each.mount_path} | ({"readOnly": True} if each.read_only else {})
        for each in wishes.volumes
    ]
    return {
        "name": WORKER,
        "image": spec.image or settings.kubernetes_worker_image,
        "imagePullPolicy": wishes.pull_policy or settings.kubernetes_pull_policy,
        "command": [f"{AGENT_FOLDER}/bin/python", "-m", "trainyard.agent", "--join"],
        "env": _environment(launch, spec, endpoint),
        "resources": _worker_resources(launch, settings),
        "securityContext": _unprivileged(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": mounts,
    }


def _environment(launch: Launch, spec: Spec, endpoint: str) -> list[Object]:
    own = {
        ENDPOINT_VARIABLE: endpoint,
        "TRAINYARD_ATTEMPT_ID": launch.facts.attempt_id,
        "TRAINYARD_CA_FILE": f"{_IDENTITY}/ca.crt",
        "TRAINYARD_TOKEN_FILE": f"{_IDENTITY}/token",
        "TRAINYARD_NODE_FOLDER": NODE_FOLDER,
        "MALLOC_ARENA_MAX": "2",  # the agent has many threads and little to do: arenas would be most of its memory
    }
    secrets = [
        {"name": each.name, "valueFrom": {"secretKeyRef": each.from_.secret.model_dump()}}
        for each in spec.secrets
        if each.from_.secret is not None
    ]
    return [{"name": name, "value": value} for name, value in own.items()] + secrets


def _worker_resources(launch: Launch, settings: Settings) -> Object:
    per_worker, workers = launch.per_worker, launch.facts.workers_per_node
    memory_bytes = per_worker.memory_bytes * workers + settings.agent_memory
    asked = _resources(per_worker.cpu * workers, memory_bytes, settings)
    if per_worker.gpu:
        gpus = {settings.kubernetes_gpu_resource: per_worker.gpu * workers}
        asked["requests"] |= gpus
        asked["limits"] = asked.get("limits", {}) | gpus
    return asked


def _resources(workers_cpu: float, memory_bytes: int, settings: Settings) -> Object:
    """What a container asks for and may take: the workers' and the agent's."""

    def amount(agent_cpu: float) -> Object:
        return {"cpu": f"{math.ceil((workers_cpu + agent_cpu) * 1000)}m", "memory": str(memory_bytes)}

    asked = {"requests": amount(settings.agent_cpu)}
    if settings.enforce_limits:
        asked["limits"] = amount(max(settings.agent_cpu, settings.agent_cpu_limit))
    return asked


def _unprivileged() -> Object:
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def _agent_volume(settings: Settings, *, mounted: bool) -> Object:
    image = {"reference": settings.kubernetes_agent_image, "pullPolicy": settings.kubernetes_pull_policy}
    return {"name": AGENT_VOLUME} | ({"image": image} if mounted else {"emptyDir": {}})


def _own_volumes(settings: Settings) -> list[Object]:
    token = {"serviceAccountToken": {"audience": AUDIENCE, "expirationSeconds": _TOKEN_S, "path": "token"}}
    root = {"configMap": {"name": settings.kubernetes_ca_config_map, "items": [{"key": "ca.crt", "path": "ca.crt"}]}}
    return [
        {"name": "trainyard-node", "emptyDir": {}},
        {"name": "trainyard-identity", "projected": {"sources": [token, root]}},
    ]


def _shared_memory(launch: Launch, wishes: Kubernetes) -> Object:
    """/dev/shm: as large as the workers' memory unless the job says otherwise.

    What is in it counts as memory of the container. So the limit of memory is reached first, whose message names it: a
    full /dev/shm ends a worker with a bare SIGBUS. The runtime's own has 64 MiB, too little for most data loaders.
    """
    if wishes.shared_memory is not None:
        size_bytes = quantities.memory_bytes(wishes.shared_memory)
    else:
        size_bytes = launch.per_worker.memory_bytes * launch.facts.workers_per_node
    limit = {"sizeLimit": str(size_bytes)} if size_bytes else {}
    return {"name": "trainyard-shm", "emptyDir": {"medium": "Memory"} | limit}


def _volume(wish: Volume, settings: Settings) -> Object:
    if wish.host_path is not None:
        if not settings.kubernetes_host_paths:
            raise StartError(
                f"spec.kubernetes.volumes: '{wish.name}' is a folder of the node, which this yard does not allow: use "
                "a persistentVolumeClaim, or ask who runs the yard for TRAINYARD_LAUNCHER_KUBERNETES_HOST_PATHS",
                "VolumeUnavailable",
            )
        source: Object = {"hostPath": {"path": wish.host_path}}
    elif wish.persistent_volume_claim is not None:
        source = {"persistentVolumeClaim": {"claimName": wish.persistent_volume_claim, "readOnly": wish.read_only}}
    elif wish.config_map is not None:
        source = {"configMap": {"name": wish.config_map}}
    elif wish.secret is not None:
        source = {"secret": {"secretName": wish.secret}}
    else:
        limit = wish.empty_dir.size_limit if wish.empty_dir else None
        source = {"emptyDir": {"sizeLimit": str(quantities.memory_bytes(limit))} if limit is not None else {}}
    return {"name": wish.name} | source


def _grace_s(grace_s: float) -> int:
    """From SIGTERM to SIGKILL: for the workers, then for what is still to be stored, then for saying so."""
    return math.ceil(grace_s + max(grace_s, _LEAST_DRAIN_S) + _GOODBYE_S)


def grace_within(seconds: float) -> float:
    """The workers' share of a pod's grace period."""
    left_s = seconds - _GOODBYE_S
    return max(0.0, min(left_s / 2, left_s - _LEAST_DRAIN_S))
