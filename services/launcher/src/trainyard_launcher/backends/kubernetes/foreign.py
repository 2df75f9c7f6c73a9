"""What pods that are not this pool's take of the machines: other people's work, other pools, DaemonSets.

Those of DaemonSets and of the kubelet itself are residents: they stay for as long as their machine. All others are
guests: what they have is free when they go.

All pods of the cluster are watched for it, if the launcher's role allows that. If not, capacity counts the pool's own
jobs alone; then the cluster's scheduler finds places for fewer pods than were admitted, which wait and say so.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from servicekit.ownership import owned_by
from trainyard.cluster import Api, ApiError

from trainyard_launcher.backends.kubernetes import machines
from trainyard_launcher.backends.kubernetes.patience import patiently
from trainyard_launcher.backends.kubernetes.watch import Mirror
from trainyard_launcher.background import Background
from trainyard_launcher.settings import Settings

logger = logging.getLogger(__name__)

_PATH = "/api/v1/pods"
_RESIDENT = ("DaemonSet", "Node")  # a pod from a file of the kubelet's belongs to its node
_ON_A_NODE = "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed"


Amounts = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Taken:
    """What pods ask for, by the names of the resources; cores and bytes."""

    machine: str
    amounts: Amounts
    resident: bool = False


class Foreign:
    """Lives on the loop's thread."""

    def __init__(self, api: Api, settings: Settings, endpoint: str, background: Background) -> None:
        self._api, self._background = api, background
        self._mirror = Mirror(
            api,
            _PATH,
            lambda pod: None if owned_by(pod, settings.identity, endpoint) else read(pod),
            lambda *_: None,
            key=lambda metadata: f"{metadata['namespace']}/{metadata['name']}",
            fieldSelector=_ON_A_NODE,
        )

    async def open(self) -> None:
        """Returns when all pods are known, or they may not be; an API server that is away is waited for."""
        try:
            await patiently(partial(self._api.get, _PATH, limit="1"), math.inf)
        except ApiError as error:
            logger.warning("pods of others are not watched: capacity counts them as room", extra={"why": str(error)})
            return
        self._background.run(self._mirror.run(), "watch")
        await self._mirror.synced.wait()

    def residents(self) -> machines.Taken:
        """What pods that stay ask for."""
        return total(each for each in self._mirror.objects.values() if each.resident)

    def guests(self) -> machines.Taken:
        """What pods ask for that may go."""
        return total(each for each in self._mirror.objects.values() if not each.resident)


def read(pod: Mapping[str, Any]) -> Taken:
    """What a pod asks for: its containers together, or its greediest init container, if that is more."""
    spec = pod["spec"]
    begins = list(spec.get("initContainers", ()))
    sidecars = [each for each in begins if each.get("restartPolicy") == "Always"]
    steady = _together(_requests(each) for each in [*spec.get("containers", ()), *sidecars])
    whole = _amounts(spec.get("resources", {}).get("requests", {}))
    most = _greatest([steady, whole, *map(_requests, begins)])
    asked = _together([most, _amounts(spec.get("overhead", {})), {"pods": 1}])
    owners = pod.get("metadata", {}).get("ownerReferences", ())
    return Taken(str(spec.get("nodeName", "")), asked, any(each["kind"] in _RESIDENT for each in owners))


def total(pods: Iterable[Taken]) -> dict[str, dict[str, float]]:
    """What pods take together, by machine."""
    found: dict[str, dict[str, float]] = {}
    for each in pods:
        _add(found.setdefault(each.machine, {}), each.amounts)
    return found


def _requests(container: Mapping[str, Any]) -> Amounts:
    resources = container.get("resources", {})
    return _amounts(resources.get("limits", {}) | resources.get("requests", {}))


def _amounts(quantities: Mapping[str, object]) -> Amounts:
    return {name: machines.amount(str(text)) for name, text in quantities.items()}


def _together(parts: Iterable[Amounts]) -> dict[str, float]:
    whole: dict[str, float] = {}
    for part in parts:
        _add(whole, part)
    return whole


def _add(whole: dict[str, float], part: Amounts) -> None:
    for name, value in part.items():
        whole[name] = whole.get(name, 0) + value


def _greatest(parts: Iterable[Amounts]) -> dict[str, float]:
    most: dict[str, float] = {}
    for part in parts:
        most |= {name: max(most.get(name, 0), value) for name, value in part.items()}
    return most
