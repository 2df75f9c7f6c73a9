"""What of a node's surroundings is likely to fail its workers later, with a message that does not name the cause."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path

from trainyard.agent.plan import Plan


def memlock() -> int | None:
    """Bytes of memory that a process here may lock at most; None without a limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if hard == resource.RLIM_INFINITY else hard


def problems(plan: Plan) -> Iterator[tuple[str, str]]:
    """Reason and text of each, for the events of the job."""
    limit = memlock()
    if plan.gpus_per_worker and plan.nodes > 1 and limit is not None:
        yield (
            "MemlockLimited",
            f"node {plan.node}: workers may lock {limit // 1024} KiB of memory (ulimit -l), and RDMA over InfiniBand "
            "or EFA needs more. The container runtime sets the limit: set LimitMEMLOCK=infinity in the unit of "
            "containerd on the machine",
        )
    kubernetes = (json.loads(plan.spec_json or "{}").get("spec") or {}).get("kubernetes") or {}
    for volume in kubernetes.get("volumes") or ():
        path = Path(volume["mountPath"])
        stored = volume.get("persistentVolumeClaim") or volume.get("hostPath")
        if stored and not volume.get("readOnly") and path.is_mount() and not os.access(path, os.W_OK):
            found = path.stat()
            yield (
                "VolumeNotWritable",
                f"node {plan.node}: workers (user {os.getuid()}, groups {_groups()}) cannot write to volume "
                f"'{volume['name']}' at {path}, of user {found.st_uid} and group {found.st_gid} with mode "
                f"{found.st_mode & 0o7777:04o}. Its storage ignores spec.kubernetes.fsGroup, as NFS and hostPath do: "
                "run as a user who may write (spec.kubernetes.runAsUser, runAsGroup), change the owner or mode of the "
                "folder, or set readOnly: true if nothing is written",
            )


def _groups() -> str:
    return ", ".join(map(str, sorted({os.getgid(), *os.getgroups()})))
