"""The yard of a cluster whose launching is held back: it admits, claims and watches, and makes no Job.

Run as `python -m trainyard_embedded` is, with the same arguments and settings.
"""

from __future__ import annotations

import runpy

from trainyard_launcher.backend import Launch
from trainyard_launcher.backends import kubernetes


class Held(kubernetes.KubernetesBackend):
    """All of the real one, but what it would make."""

    async def start(self, launch: Launch) -> str:
        return ""


if __name__ == "__main__":
    kubernetes.KubernetesBackend = Held  # type: ignore[misc]
    runpy.run_module("trainyard_embedded", run_name="__main__", alter_sys=True)
