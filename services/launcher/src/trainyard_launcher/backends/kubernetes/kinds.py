"""Machines that a cluster autoscaler makes when pods need them: what is declared of them, and which there are."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator
from pydantic.alias_generators import to_camel
from trainyard.spec import quantities
from trainyard_protos.v1 import scheduler_pb2

from trainyard_launcher.backends.kubernetes import machines, taints
from trainyard_launcher.backends.kubernetes.taints import Toleration

_MACHINES_MAX = 10_000
_PROVISION_MAX_S = 86_400


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel)


class Taint(_Part):
    """A taint that machines of a kind are made with."""

    key: str = Field(min_length=1)
    value: str = ""
    effect: Literal["NoSchedule", "NoExecute", "PreferNoSchedule"] = "NoSchedule"


class Kind(_Part):
    """A kind of machines.

    Attributes:
        max: how many there may be.
        resources: what each has for jobs' pods, by the names of Kubernetes: cpu, memory, pods, GPUs.
        labels: by which a machine is known to be of this kind; its pods require them.
        provision_timeout: how long an attempt waits for its machines.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")
    max: int = Field(ge=1, le=_MACHINES_MAX)
    resources: Mapping[str, str | int | float]
    labels: Mapping[str, str] = Field(min_length=1)
    taints: tuple[Taint, ...] = ()
    provision_timeout: str | int | float = "15m"

    @field_validator("resources")
    @classmethod
    def _are_quantities(cls, found: Mapping[str, str | int | float]) -> Mapping[str, str | int | float]:
        for name, text in found.items():
            try:
                machines.amount(str(text))
            except ValueError:
                raise ValueError(f"{name}: expected a quantity such as 8, 500m or 64Gi, got '{text}'") from None
        return found

    @field_validator("provision_timeout")
    @classmethod
    def _is_a_duration(cls, found: str | int | float) -> str | int | float:
        try:
            seconds = quantities.seconds(found)
        except ValueError:
            seconds = 0
        if not 0 < seconds <= _PROVISION_MAX_S:
            raise ValueError(f"expected a duration of at most 24h such as 15m, got '{found}'")
        return found

    def includes(self, labels: Mapping[str, str]) -> bool:
        """Whether a node with these labels is of this kind."""
        return all(labels.get(key) == value for key, value in self.labels.items())

    def offer(
        self, known: Iterable[machines.Machine], gpu: str, tolerations: Iterable[Toleration]
    ) -> scheduler_pb2.MachineKind:
        """What the scheduler is told of it.

        Args:
            known: all nodes of the cluster.
            gpu: name of the resource that GPUs are.
            tolerations: of every pod.
        """
        keep_away = taints.read({"taints": [each.model_dump() for each in self.taints]})
        amounts = {"pods": 110.0} | {name: machines.amount(str(text)) for name, text in self.resources.items()}
        return scheduler_pb2.MachineKind(
            name=self.name,
            max=self.max,
            total=machines.resources(amounts, gpu),
            labels=self.labels,
            taints=taints.messages(taints.untolerated(keep_away, list(tolerations))),
            provision_timeout_s=quantities.seconds(self.provision_timeout),
            machines=sorted(each.name for each in known if self.includes(each.labels)),
        )


_KINDS = TypeAdapter(tuple[Kind, ...])


def read_kinds(text: str) -> tuple[Kind, ...]:
    """The kinds in a JSON list; "" for none.

    Raises:
        ValueError: it is no such list, two kinds have one name, or an amount cannot be read.
    """
    if not text:
        return ()
    try:
        kinds = _KINDS.validate_python(json.loads(text))
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise ValueError(f"kubernetes_machine_kinds: {wrong}") from error
    except ValueError as error:
        raise ValueError(f"kubernetes_machine_kinds: {error}") from error
    names = [kind.name for kind in kinds]
    if len(set(names)) < len(names):
        raise ValueError(f"kubernetes_machine_kinds: each kind needs a name of its own, got {', '.join(names)}")
    return kinds


def named(kinds: Iterable[Kind], name: str) -> Kind | None:
    """The kind of this name; None when it is not declared any more."""
    return next((kind for kind in kinds if kind.name == name), None)
