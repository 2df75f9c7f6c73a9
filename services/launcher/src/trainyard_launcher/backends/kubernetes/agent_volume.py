"""How the agent reaches a pod: its image is mounted where every machine can do so, and copied elsewhere.

Mounting takes milliseconds and no disk; copying takes seconds and 260 MB for each pod. What a machine can do is in what
it says of itself: the version of the API server tells nothing about container runtimes.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any

from trainyard_launcher.backends.kubernetes.machines import Machine
from trainyard_launcher.backends.kubernetes.manifests import AGENT
from trainyard_launcher.settings import Settings

logger = logging.getLogger(__name__)

_KUBELET = (1, 35)
"""Image volumes are on from there; the API server is never older than a kubelet."""
_CONTAINERD = (2, 2)
"""Before it, `subPath` is ignored without a word, and the image's root is mounted."""
_VERSION = re.compile(r"v?(\d+)\.(\d+)")
_OLD = (0, 0)


class AgentVolume:
    """Decides it for each attempt, by the machines there are then.

    Args:
        template: of pods. One that changes the init container which copies the agent has it copied.
    """

    def __init__(self, settings: Settings, template: Mapping[str, Any]) -> None:
        self._wanted = settings.kubernetes_agent_volume
        self._template_copies = any(
            each.get("name") == AGENT for each in template.get("spec", {}).get("initContainers", ())
        )
        self._told = ""

    def is_mounted(self, machines: Iterable[Machine]) -> bool:
        """Whether the agent's image is mounted; says in the log why not when it is left to find out."""
        if self._wanted != "auto":
            return self._wanted == "image"
        why = self._obstacle(machines)
        if why and why != self._told:
            logger.warning("the agent is copied into pods, which takes seconds", extra={"why": why})
        self._told = why
        return not why

    def _obstacle(self, machines: Iterable[Machine]) -> str:
        """Why the image cannot be mounted everywhere; "" when it can."""
        if self._template_copies:
            return f"the pod template names the init container '{AGENT}'"
        known = list(machines)
        unable = next((each for each in known if not _can_mount(each.kubelet, each.runtime)), None)
        if unable is not None:
            return (
                f"machine {unable.name} has kubelet {unable.kubelet or 'unknown'} and {unable.runtime or 'no runtime'}"
                "; needed are 1.35 and containerd 2.2"
            )
        return "" if known else "no machine is known yet"


@functools.lru_cache(maxsize=256)
def _can_mount(kubelet: str, runtime: str) -> bool:
    """Whether a machine mounts folders of images so that programs in them can be run.

    CRI-O is not among those: at first nothing on such a mount of it could be run, and later versions are not tried.
    """
    kind, _, version = runtime.partition("://")
    return kind == "containerd" and _parsed(kubelet) >= _KUBELET and _parsed(version) >= _CONTAINERD


def _parsed(version: str) -> tuple[int, int]:
    found = _VERSION.match(version)
    return (int(found[1]), int(found[2])) if found else _OLD
