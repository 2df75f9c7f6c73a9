"""What a launcher says of its pool, as admission sees it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from servicekit.errors import InvalidArgument
from trainyard.spec.allowed import AllowedPods
from trainyard_protos.v1 import common_pb2, scheduler_pb2

from trainyard_scheduler import views
from trainyard_scheduler.domain.admission import NOTHING, Amount, Kind, Machine, Offer
from trainyard_scheduler.domain.matching import Taint, Toleration

_MACHINES_MAX = 10_000
_KINDS_MAX = 100
_CPU_MAX = 1_000_000
_LABELS_MAX = 500
_KIND = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_PROVISION_MAX_S = 86_400.0


def read_offer(request: scheduler_pb2.RegisterPoolRequest) -> Offer:
    """The offer in a registration.

    Raises:
        InvalidArgument: it has too many machines or kinds, two of one name, or amounts that cannot be.
    """
    _require_names("machines", [each.name for each in request.machines], _MACHINES_MAX)
    _require_names("kinds of machines", [each.name for each in request.kinds], _KINDS_MAX)
    return Offer(
        {each.name: _machine(each) for each in request.machines},
        _amount("overhead", request.overhead) if request.HasField("overhead") else NOTHING,
        tuple(
            Toleration(each.key, each.operator or "Equal", each.value, each.effect) for each in request.gpu_tolerations
        ),
        {each.name: _kind(each) for each in request.kinds},
        {each.name: _machine(each) for each in request.unusable_machines},
        _allowed_pods(request.allowed_pods) if request.HasField("allowed_pods") else None,
    )


def _allowed_pods(given: scheduler_pb2.AllowedPods) -> AllowedPods:
    return AllowedPods(tuple(given.priority_classes), tuple(given.tolerations))


def _machine(given: scheduler_pb2.Machine) -> Machine:
    return Machine(
        _amount(given.name, given.total),
        _amount(given.name, given.others) if given.HasField("others") else NOTHING,
        _labels(given.name, given.labels),
        _taints(given.taints),
    )


def _kind(given: scheduler_pb2.MachineKind) -> Kind:
    if not _KIND.fullmatch(given.name) or not 0 < given.max <= _MACHINES_MAX:
        raise InvalidArgument(
            f"kind '{given.name[:64]}' of at most {given.max} machines; allowed: a name of 1 to 63 of a-z, A-Z, 0-9, "
            f"'.', '_' and '-', and a maximum of 1 to {_MACHINES_MAX:,}",
            reason="InvalidKinds",
        )
    if not 0 < given.provision_timeout_s <= _PROVISION_MAX_S:
        raise InvalidArgument(
            f"kind '{given.name}' has a provision timeout of {given.provision_timeout_s:g} s; allowed: more than 0, at "
            f"most {_PROVISION_MAX_S:g}",
            reason="InvalidKinds",
        )
    return Kind(
        given.name,
        given.max,
        _amount(given.name, given.total),
        _labels(given.name, given.labels),
        _taints(given.taints),
        given.provision_timeout_s,
        frozenset(given.machines),
    )


def _taints(given: Iterable[scheduler_pb2.Taint]) -> tuple[Taint, ...]:
    return tuple(Taint(each.key, each.value, each.effect) for each in given)


def _labels(machine: str, given: Mapping[str, str]) -> dict[str, str]:
    labels = dict(given)
    if len(labels) > _LABELS_MAX:
        raise InvalidArgument(
            f"machine '{machine[:64]}' has {len(labels)} labels; at most {_LABELS_MAX} are allowed",
            reason="InvalidMachines",
        )
    return labels


def _require_names(what: str, names: Sequence[str], most: int) -> None:
    if "" in names or len(set(names)) != len(names) or len(names) > most:
        raise InvalidArgument(
            f"a pool has at most {most} {what}, each with a name of its own", reason="InvalidMachines"
        )


def _amount(machine: str, given: common_pb2.Resources) -> Amount:
    """What a machine has, or others use of it; NaN, infinity and what the database cannot hold are refused."""
    if not 0 <= given.cpu <= _CPU_MAX or min(given.memory_bytes, given.gpu, given.pods) < 0:
        raise InvalidArgument(
            f"machine '{machine[:64]}' has {given.cpu} cpu, {given.memory_bytes} bytes of memory, {given.gpu} gpu, "
            f"{given.pods} pods; allowed: numbers from 0, at most {_CPU_MAX:,} cpu",
            reason="InvalidMachines",
            fields={"machine": machine[:64]},
        )
    return views.amount(given)
