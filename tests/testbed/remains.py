"""What is left on this machine of a cluster of the testbed, and of anything else."""

import subprocess
from pathlib import Path

import psutil

from scripts.testbed.cluster import cgroups, processes


def of_cluster(cluster, namespaces=frozenset()):
    """All that is left of a cluster.

    Args:
        namespaces: those that it had (`namespaces_of_cluster`).
    """
    name, number = cluster.layout.name, cluster.layout.number
    links = subprocess.run(["ip", "-oneline", "link"], capture_output=True, text=True, check=True).stdout
    yield from (str(process) for process in processes.marked(f"{number}/"))
    yield from (str(process) for process in psutil.process_iter() if namespaces_of(process) & namespaces)
    yield from (str(path) for path in cgroups.present(name))
    yield from (line for line in _mounts() if str(cluster.layout.folder) in line)
    yield from (line for line in links.splitlines() if name in line or f"ty{number}-" in line)
    if cluster.layout.folder.exists():
        yield str(cluster.layout.folder)


def packet_filter():
    """The host's rules, without how often each was used."""
    saved = subprocess.run(["iptables-save"], capture_output=True, text=True, check=True).stdout
    return [line for line in saved.splitlines() if line.startswith("-A")]


def mount_points():
    return [line.split()[1] for line in _mounts()]


def is_mounted(folder):
    return folder in mount_points()


def _mounts():
    return Path("/proc/self/mounts").read_text().splitlines()


def namespaces_of(process):
    """None for a process that has ended, also when nobody has asked how."""
    try:
        ended = process.status() == psutil.STATUS_ZOMBIE
        kinds = [] if ended else ["net", "mnt", "pid"]
        return {str(Path(f"/proc/{process.pid}/ns/{kind}").readlink()) for kind in kinds}
    except (OSError, psutil.NoSuchProcess):
        return set()


def namespaces_of_cluster(cluster):
    """Those that a cluster has and this process has not."""
    marked = processes.marked(f"{cluster.layout.number}/")
    return set().union(*(namespaces_of(process) for process in marked)) - namespaces_of(psutil.Process())
