"""The control groups of the nodes' pods: one subtree a node, in each hierarchy of version 1 or the one of version 2.

Without a subtree of its own each kubelet would take the other's pods for leftovers and kill them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


def make(path: str) -> None:
    """Makes the group, with every CPU and memory node of its parent.

    Args:
        path: below the root of each hierarchy, such as `trainyard0/node-1`.
    """
    for hierarchy in _hierarchies():
        folder = hierarchy
        for name in path.split("/"):
            _delegate(folder)
            folder = folder / name
            folder.mkdir(exist_ok=True)
            _inherit_cpus(folder)


def remove(path: str) -> None:
    """Removes the group with those below it, which have no process any more."""
    for hierarchy in _hierarchies():
        top = hierarchy / path
        if top.is_dir():
            for folder in sorted((item for item in top.rglob("*") if item.is_dir()), reverse=True):
                folder.rmdir()
            top.rmdir()


def present(path: str) -> list[Path]:
    """The folders of the group that are there."""
    return [hierarchy / path for hierarchy in _hierarchies() if (hierarchy / path).is_dir()]


def _hierarchies() -> Iterator[Path]:
    """Where they are mounted: the root itself in version 2, its folders in version 1."""
    if (_ROOT / "cgroup.controllers").exists():
        yield _ROOT
        return
    for folder in sorted(_ROOT.iterdir()):
        if folder.is_dir() and not folder.is_symlink() and (folder / "cgroup.procs").exists():
            yield folder


def _delegate(folder: Path) -> None:
    controllers = folder / "cgroup.controllers"
    if controllers.exists() and (wanted := controllers.read_text().split()):
        (folder / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in wanted))


def _inherit_cpus(folder: Path) -> None:
    for name in ("cpuset.cpus", "cpuset.mems"):
        file = folder / name
        if file.exists() and (folder.parent / "cgroup.controllers").exists() is False and not file.read_text().strip():
            file.write_text((folder.parent / name).read_text())
