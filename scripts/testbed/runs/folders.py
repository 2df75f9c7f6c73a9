"""`python -m scripts.testbed.runs.folders FOLDER ROOT PID [KEPT]`: removes and tidies the temporary folders of a run.

FOLDER is removed. ROOT is where pytest keeps the folders of its last runs, to be looked into; PID is the process id of
the pytest, and KEPT its folder, when that is known. Everything that is of no use to a reader is removed from there:
mounts, sockets, and the control groups of the attempts of yards that lie there (with version 1 they are in no group of
the run). So is the file by which pytest knows that a run still needs its folder.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
_LOCK = ".lock"


def remove(folder: Path) -> None:
    """Removes a folder with what is mounted in it; raises OSError or subprocess.CalledProcessError."""
    unmount_below(folder)
    with suppress(FileNotFoundError):
        shutil.rmtree(folder)


def kept_by_pytest(root: Path, pid: int) -> Iterator[Path]:
    """The folder of a pytest that has not ended in order: it is locked.

    Args:
        root: where pytest keeps the folders of every user.
        pid: the process id of the pytest.
    """
    for lock in root.glob(f"pytest-of-*/pytest-*/{_LOCK}"):
        with suppress(FileNotFoundError):  # another pytest removes its own
            if lock.read_text() == str(pid):
                yield lock.parent.resolve()


def tidy(folder: Path) -> None:
    """Tidies the folder of a pytest; raises OSError or subprocess.CalledProcessError."""
    unmount_below(folder)
    _remove_groups(_remove_sockets(folder))
    (folder / _LOCK).unlink(missing_ok=True)


def unmount_below(folder: Path) -> None:
    """Unmounts what is mounted in a folder, the latest first; raises subprocess.CalledProcessError."""
    mounted = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for point in reversed(mounted):
        if Path(point).is_relative_to(folder):
            # Lazily: a process in another run may still look at it.
            subprocess.run(["umount", "--lazy", point], check=True)


def _remove_sockets(folder: Path) -> set[str]:
    """Removes the sockets in a folder; returns the ids of the attempts of yards that it has seen there."""
    attempts: set[str] = set()
    for path, folders, files in os.walk(folder):
        if Path(path).name == "attempts":
            attempts.update(folders)
        for name in files:
            file = Path(path, name)
            with suppress(FileNotFoundError):
                if stat.S_ISSOCK(file.lstat().st_mode):
                    file.unlink()
    return attempts


def _remove_groups(attempts: set[str]) -> None:
    for group in _groups() if attempts else ():
        if group.name.removeprefix("trainyard-").rpartition("-")[0] in attempts:
            with suppress(FileNotFoundError):
                group.rmdir()


def _groups() -> Iterator[Path]:
    yield from (Path(path, name) for path, names, _ in os.walk(_GROUPS) for name in names)


if __name__ == "__main__":
    _, _folder, _root, _pid, *_kept = sys.argv
    for _each in {*map(Path, _kept), *kept_by_pytest(Path(_root), int(_pid))}:
        tidy(_each)
    remove(Path(_folder))
