"""Fake nodes: kwok answers for them, and their pods run as the rules below say. For questions of scale alone."""

from __future__ import annotations

import json
from typing import Any

from scripts.testbed.cluster import binaries, certificates
from scripts.testbed.cluster.machine import Machine

NAME = "kwok"
LABEL = "type"
TAINT = "kwok.x-k8s.io/node"
DURATION = "trainyard.test/duration"
"""The annotation of a pod that says after how long it succeeds, such as `5s`; without it the pod runs on."""
_READY = """
{{ $now := Now }}
conditions:
{{ range NodeConditions }}
- lastHeartbeatTime: {{ $now | Quote }}
  lastTransitionTime: {{ $now | Quote }}
  message: {{ .message | Quote }}
  reason: {{ .reason | Quote }}
  status: {{ .status | Quote }}
  type: {{ .type | Quote }}
{{ end }}
addresses:
- {address: {{ NodeIP | Quote }}, type: InternalIP}
allocatable: {{ YAML .status.allocatable 1 }}
capacity: {{ YAML .status.capacity 1 }}
phase: Running
"""
_RUNNING = """
{{ $now := Now }}
conditions:
{{ range tuple "Initialized" "Ready" "ContainersReady" "PodScheduled" }}
- {lastTransitionTime: {{ $now | Quote }}, status: "True", type: {{ . | Quote }}}
{{ end }}
containerStatuses:
{{ range .spec.containers }}
- image: {{ .image | Quote }}
  imageID: ""
  name: {{ .name | Quote }}
  ready: true
  started: true
  restartCount: 0
  state: {running: {startedAt: {{ $now | Quote }}}}
{{ end }}
initContainerStatuses:
{{ range .spec.initContainers }}
- image: {{ .image | Quote }}
  imageID: ""
  name: {{ .name | Quote }}
  ready: true
  restartCount: 0
  state: {terminated: {exitCode: 0, reason: Completed, startedAt: {{ $now | Quote }}, finishedAt: {{ $now | Quote }}}}
{{ end }}
hostIP: {{ NodeIPWith .spec.nodeName | Quote }}
podIP: {{ PodIPWith .spec.nodeName ( or .spec.hostNetwork false ) ( or .metadata.uid "" ) ( or .metadata.name "" )
 ( or .metadata.namespace "" ) | Quote }}
phase: Running
startTime: {{ $now | Quote }}
"""
_SUCCEEDED = """
{{ $now := Now }}
containerStatuses:
{{ range .spec.containers }}
- image: {{ .image | Quote }}
  imageID: ""
  name: {{ .name | Quote }}
  ready: false
  started: false
  restartCount: 0
  state: {terminated: {exitCode: 0, reason: Completed, startedAt: {{ $now | Quote }}, finishedAt: {{ $now | Quote }}}}
{{ end }}
phase: Succeeded
"""


def start(machine: Machine) -> None:
    """Starts kwok on a machine, when it does not run there."""
    if machine.runs(NAME):
        return
    file = machine.folder / "kwok.yaml"
    file.write_text("\n---\n".join(json.dumps(stage) for stage in _stages()))
    command = [
        str(binaries.kwok.program(NAME)),
        f"--kubeconfig={certificates.kubeconfig(machine.layout, certificates.ADMIN)}",
        f"--config={file}",
        f"--manage-nodes-with-annotation-selector={TAINT}=fake",
        f"--cidr={machine.layout.fake_pods}",
        f"--node-ip={machine.address}",
        *("--node-lease-duration-seconds=40", "--server-address=127.0.0.1:10247"),
    ]
    machine.start(NAME, command)


def nodes(count: int) -> dict[str, Any]:
    """The objects of that many fake nodes, `kwok-0` and on; only pods that tolerate their taint go there."""
    resources = {"cpu": "64", "memory": "256Gi", "pods": "110", "nvidia.com/gpu": "8", "ephemeral-storage": "1Ti"}
    items = [
        {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {
                "name": name,
                "annotations": {TAINT: "fake"},
                "labels": {LABEL: "kwok", "kubernetes.io/hostname": name, "kubernetes.io/os": "linux"},
            },
            "spec": {"taints": [{"key": TAINT, "value": "fake", "effect": "NoSchedule"}]},
            "status": {"allocatable": resources, "capacity": resources},
        }
        for name in (f"kwok-{number}" for number in range(count))
    ]
    return {"apiVersion": "v1", "kind": "List", "items": items}


def _stages() -> list[dict[str, Any]]:
    kept = {"key": ".metadata.deletionTimestamp", "operator": "DoesNotExist"}
    deleted = {"key": ".metadata.deletionTimestamp", "operator": "Exists"}
    here = {"key": ".spec.nodeName", "operator": "Exists"}
    duration = f'.metadata.annotations["{DURATION}"]'
    return [
        _stage("node-ready", "Node", [_phase("NotIn", "Running")], {"statusTemplate": _READY}),
        _stage(
            "pod-running",
            "Pod",
            [kept, here, _phase("NotIn", "Running", "Succeeded", "Failed")],
            {"statusTemplate": _RUNNING},
        ),
        _stage(
            "pod-succeeded",
            "Pod",
            [kept, _phase("In", "Running"), {"key": duration, "operator": "Exists"}],
            {"statusTemplate": _SUCCEEDED},
            {"durationFrom": {"expressionFrom": duration}},
        ),
        _stage("pod-deleted", "Pod", [deleted, here], {"finalizers": {"empty": True}, "delete": True}),
    ]


def _phase(operator: str, *values: str) -> dict[str, Any]:
    return {"key": ".status.phase", "operator": operator, "values": list(values)}


def _stage(
    name: str, kind: str, when: list[dict[str, Any]], then: dict[str, Any], delay: dict[str, Any] | None = None
) -> dict[str, Any]:
    spec = {"resourceRef": {"apiGroup": "v1", "kind": kind}, "selector": {"matchExpressions": when}, "next": then}
    return {
        "apiVersion": "kwok.x-k8s.io/v1alpha1",
        "kind": "Stage",
        "metadata": {"name": name},
        "spec": spec | ({"delay": delay} if delay else {}),
    }
