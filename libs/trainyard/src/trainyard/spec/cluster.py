"""The part of a document that only a Kubernetes cluster reads: `spec.kubernetes`.

Names and limits are those of Kubernetes, so that what is accepted here its API server takes as well. On one machine
all of it is read, checked and then left alone, so that one file serves both.
"""

from __future__ import annotations

from posixpath import normpath
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator

from trainyard.spec.amounts import Memory
from trainyard.spec.checks import exactly_one, one_required, refuse, unique
from trainyard.spec.fields import HostPath, Labels, MountPath, Name, ObjectName, TaintKey
from trainyard.spec.part import Part

Effect = Literal["NoSchedule", "PreferNoSchedule", "NoExecute"]
UserId = Annotated[int, Field(ge=1, le=2**31 - 1)]
"""Not 0: pods run without root."""

_VOLUME_SOURCES = ("persistent_volume_claim", "config_map", "secret", "host_path", "empty_dir")


class Toleration(Part):
    key: TaintKey | None = Field(
        default=None, description="Key of the taint. Absent, with `operator: Exists`: every taint.", examples=["gpu"]
    )
    operator: Literal["Equal", "Exists"] = Field(
        default="Equal", description="Whether the taint has to have this value, or any."
    )
    value: Annotated[str, Field(max_length=63)] | None = Field(
        default=None, description="Value of the taint, with `operator: Equal`.", examples=["true"]
    )
    effect: Effect | None = Field(
        default=None, description="Effect of the taint. Absent: each.", examples=["NoSchedule"]
    )
    toleration_seconds: Annotated[int, Field(ge=0, le=10**9)] | None = Field(
        default=None, description="With `effect: NoExecute`: for how many seconds. Absent: without end."
    )

    @model_validator(mode="after")
    def _is_one_that_kubernetes_takes(self) -> Toleration:
        if self.key is None and self.operator != "Exists":
            refuse("has no key", allowed="a key, or operator: Exists for every taint")
        if self.value is not None and self.operator == "Exists":
            refuse("a taint that only has to exist has no value here", allowed="operator: Equal with it", at=("value",))
        if self.toleration_seconds is not None and self.effect != "NoExecute":
            refuse("only evictions wait", allowed="with effect: NoExecute", at=("tolerationSeconds",))
        return self


class EmptyDir(Part):
    size_limit: Memory | None = Field(
        default=None, description="The pod is evicted when it holds more. Absent: the node's disk.", examples=["20Gi"]
    )


class Volume(Part):
    model_config = ConfigDict(json_schema_extra=one_required(*_VOLUME_SOURCES))

    name: Name = Field(description="Name of the volume in the pod.", examples=["data"])
    mount_path: MountPath = Field(description="Where the workers see it.", examples=["/data"])
    read_only: bool = Field(default=False, description="Whether workers may only read it.")
    persistent_volume_claim: ObjectName | None = Field(
        default=None, description="A claim in the namespace of the jobs.", examples=["datasets"]
    )
    config_map: ObjectName | None = Field(default=None, description="A ConfigMap, each key a file.")
    secret: ObjectName | None = Field(default=None, description="A Secret, each key a file.")
    host_path: HostPath | None = Field(
        default=None, description="A folder of the node. Refused by clusters that hold pods to a restricted standard."
    )
    empty_dir: EmptyDir | None = Field(default=None, description="A new, empty folder for each pod.", examples=[{}])

    _one_source = model_validator(mode="after")(exactly_one(*_VOLUME_SOURCES))


class Kubernetes(Part):
    node_selector: Labels = Field(
        default_factory=dict, description="Labels that a node must have.", examples=[{"gpu": "a100"}]
    )
    tolerations: Annotated[tuple[Toleration, ...], Field(max_length=32)] = Field(
        default=(),
        description="Taints of nodes that do not keep the pods away. The cluster lists the keys that it allows.",
        examples=[[{"key": "gpu", "operator": "Exists"}]],
    )
    volumes: Annotated[
        tuple[Volume, ...],
        Field(max_length=32),
        unique(lambda volume: volume.name, "name"),
        unique(lambda volume: normpath(volume.mount_path), "mountPath"),
    ] = Field(default=(), description="What is mounted into every pod.")
    shared_memory: Memory | None = Field(
        default=None,
        description="Size of `/dev/shm`, out of the memory of the workers. Absent: as large as that memory.",
        examples=["1Gi"],
    )
    service_account: ObjectName | None = Field(
        default=None, description="Account of the pods. Absent: the one the launcher was set up with."
    )
    pull_secrets: Annotated[tuple[ObjectName, ...], Field(max_length=16)] = Field(
        default=(), description="Secrets with which images are pulled.", examples=[["registry"]]
    )
    pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = Field(
        default=None, description="When the image is pulled. Absent: as the launcher was set up."
    )
    topology: Literal["spread", "pack"] | None = Field(
        default=None,
        description="Whether pods should be on different machines (`spread`) or close together (`pack`), where there "
        "is a choice. Absent: no wish.",
    )
    priority_class: ObjectName | None = Field(
        default=None,
        description="PriorityClass of the pods, one that the cluster allows. The yard's own order is `spec.priority`.",
    )
    run_as_user: UserId | None = Field(
        default=None, description="User of the workers. Absent: as the launcher was set up, never root."
    )
    run_as_group: UserId | None = Field(default=None, description="Group of the workers.")
    fs_group: UserId | None = Field(default=None, description="Group that owns mounted volumes.")
