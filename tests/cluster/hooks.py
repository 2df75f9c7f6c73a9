"""The hook of the chart, run on this machine."""

from __future__ import annotations

import os
import subprocess
import sys

from scripts.testbed.cluster.cluster import Cluster
from scripts.testbed.patience import PATIENCE_S


def run_hook(cluster: Cluster, hook: str = "install", **settings: str) -> subprocess.CompletedProcess[str]:
    """`python -m trainyard_setup HOOK` with these settings, to its end."""
    environ = {f"TRAINYARD_SETUP_{name}": value for name, value in settings.items()}
    return subprocess.run(
        [sys.executable, "-m", "trainyard_setup", hook],
        env=os.environ | environ | {"KUBECONFIG": str(cluster.kubeconfig)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
