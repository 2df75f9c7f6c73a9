"""What the cluster needs of the machine: Linux, root, and some packages of Debian."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from scripts.testbed import fetch
from scripts.testbed.cluster import binaries, images, node

# The packages whose programs other programs look for in their usual places, and one of those programs.
_PACKAGES = {
    "runc": node.RUNC,
    "containernetworking-plugins": node.CNI / "ptp",
    "iptables": Path("/usr/sbin/iptables"),
    "conntrack": Path("/usr/sbin/conntrack"),
    "iproute2": Path("/usr/sbin/ip"),
}


def obstacle() -> str:
    """Why no cluster can run here, in words; empty when one can."""
    if not sys.platform.startswith("linux"):
        return "a cluster runs on Linux alone"
    if os.geteuid() != 0:
        return "a cluster needs root"
    return ""


def get(sources: Iterable[binaries.Source]) -> list[Path]:
    """Gets what a cluster stands on, as far as it is not there.

    Args:
        sources: of the programs that are wanted.

    Returns:
        The folders and files that this machine has for it.

    Raises:
        fetch.Unavailable: something cannot be had.
    """
    install()
    return [*(source.folder() for source in sources), *images.built_in()]


def install() -> None:
    """Installs the packages that are missing; raises fetch.Unavailable."""
    missing = [package for package, program in _PACKAGES.items() if not program.exists()]
    if not missing:
        return
    if shutil.which("apt-get") is None:
        raise fetch.Unavailable(f"install {', '.join(missing)} with your package manager")
    if _apt("install", *missing).returncode:
        _apt("update")
        done = _apt("install", *missing)
        if done.returncode:
            raise fetch.Unavailable(f"cannot install {', '.join(missing)}:\n{done.stderr[-2000:]}")


def _apt(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["apt-get", "--yes", "--quiet", "--no-install-recommends", "-o", "DPkg::Lock::Timeout=600", *arguments]
    environ = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=environ)
