"""CPU and memory limits of nodes through Linux control groups, version 1 and 2, where this process may make some.

A node's agent joins its groups itself, before anything else, so that everything it starts is in them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

_PERIOD_US = 100_000
_CONTROLLERS = ("cpu", "memory")


@dataclass(frozen=True, slots=True)
class Mount:
    """Where a hierarchy is mounted, and which controllers it has ("" names version 2)."""

    path: Path
    controllers: frozenset[str]


@dataclass(frozen=True, slots=True)
class Cgroups:
    """The folders under which groups can be made.

    Args:
        parents: by controller; with version 2 all are the same folder.
        version: 1 or 2.
        why_not: controllers without a parent, and why.
    """

    parents: Mapping[str, Path]
    version: int
    why_not: str = ""

    @property
    def limits_cpu(self) -> bool:
        """Whether groups get no more cores than they were made for."""
        return "cpu" in self.parents

    def create(self, name: str, cpu: float, memory_bytes: int) -> tuple[str, ...]:
        """Makes a node's groups with their limits; returns their folders.

        Raises:
            OSError: the kernel refused.
        """
        folders = []
        for controller, parent in self.parents.items():
            folder = parent / name
            folder.mkdir(exist_ok=True)
            self._limit(controller, folder, cpu, memory_bytes)
            folders.append(str(folder))
        return tuple(dict.fromkeys(folders))

    def _limit(self, controller: str, folder: Path, cpu: float, memory_bytes: int) -> None:
        quota = max(int(cpu * _PERIOD_US), 1000)
        match controller, self.version:
            case "cpu", 2:
                _write(folder / "cpu.max", f"{quota} {_PERIOD_US}")
            case "cpu", _:
                _write(folder / "cpu.cfs_period_us", str(_PERIOD_US))
                _write(folder / "cpu.cfs_quota_us", str(quota))
            case "memory", 2:
                _write(folder / "memory.max", str(memory_bytes))
                with contextlib.suppress(OSError):  # kernels without swap accounting
                    _write(folder / "memory.swap.max", "0")
            case "memory", _:
                _write(folder / "memory.limit_in_bytes", str(memory_bytes))
                with contextlib.suppress(OSError):
                    _write(folder / "memory.memsw.limit_in_bytes", str(memory_bytes))


def procs_files(folders: tuple[str, ...]) -> list[str]:
    """The files a process writes itself into to join."""
    return [str(Path(folder) / "cgroup.procs") for folder in folders]


def remove(folders: tuple[str, ...], timeout_s: float = 2) -> None:
    """Removes groups. The kernel lets go of a group a moment after its last process, and tells nobody when."""
    deadline = time.monotonic() + timeout_s
    for folder in folders:
        while True:
            try:
                Path(folder).rmdir()
            except FileNotFoundError:
                pass
            except OSError as error:
                if time.monotonic() < deadline:
                    time.sleep(0.01)
                    continue
                logger.warning("cgroup left behind", extra={"folder": folder, "why": error.strerror})
            break


def detect(proc: Path = Path("/proc/self")) -> Cgroups:
    """What this process may limit.

    Args:
        proc: its folder in /proc.
    """
    try:
        mounts = _mounts((proc / "mounts").read_text())
        own = _own((proc / "cgroup").read_text())
    except OSError as error:
        return Cgroups({}, 1, f"{error.filename} cannot be read")
    unified = next((mount for mount in mounts if "" in mount.controllers), None)
    if unified is not None and (parent := _unified_parent(unified.path, own.get("", "/"))) is not None:
        return Cgroups(dict.fromkeys(_CONTROLLERS, parent), 2)
    parents = {}
    for controller in _CONTROLLERS:
        for mount in mounts:
            if controller in mount.controllers and (parent := _writable(_inside(mount.path, own.get(controller, "/")))):
                parents[controller] = parent
    missing = [controller for controller in _CONTROLLERS if controller not in parents]
    return Cgroups(parents, 1, f"no cgroup can be made for {' and '.join(missing)}" if missing else "")


def _mounts(text: str) -> list[Mount]:
    mounts = []
    for line in text.splitlines():
        _, path, kind, options = line.split()[:4]
        if kind == "cgroup2":
            mounts.append(Mount(Path(path), frozenset({""})))
        elif kind == "cgroup":
            mounts.append(Mount(Path(path), frozenset(options.split(","))))
    return mounts


def _own(text: str) -> dict[str, str]:
    """Paths of this process's groups by controller ("" for version 2)."""
    own = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        own.update(dict.fromkeys(controllers.split(","), path))
    return own


def _inside(mount: Path, path: str) -> Path:
    folder = mount / path.lstrip("/")
    # In a container the path can be one of the host's, which is not to be seen here.
    return folder if ".." not in path and folder.is_dir() else mount


def _unified_parent(mount: Path, path: str) -> Path | None:
    """A folder whose children get both controllers: this process's own group, or the one above it.

    A group with processes of its own cannot hand controllers to its children; then the group above is the place.
    """
    own = _inside(mount, path)
    for candidate in (own, own.parent) if own != mount else (own,):
        if _hands_down(candidate) and _writable(candidate):
            return candidate
    return None


def _hands_down(folder: Path) -> bool:
    control = folder / "cgroup.subtree_control"
    with contextlib.suppress(OSError):
        if set(_CONTROLLERS) <= set(control.read_text().split()):
            return True
        if set(_CONTROLLERS) <= set((folder / "cgroup.controllers").read_text().split()):
            _write(control, " ".join(f"+{controller}" for controller in _CONTROLLERS))
            return True
    return False


def _writable(parent: Path) -> Path | None:
    probe = parent / f"trainyard-probe-{os.getpid()}"
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError:
        return None
    return parent


def _write(path: Path, text: str) -> None:
    # No O_CREAT: a control file that is missing is an error, not a file to make.
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)
