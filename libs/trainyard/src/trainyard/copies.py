"""Copies in a node's folder of what the artifact store has, and their removal.

An agent records each copy once the store has acknowledged it: a stored or restored checkpoint by the names, sizes and
times of its files, and like an input by the time since which it is complete. A copy that was changed since is not one,
and stays, and so does one in which something is mounted.
When the attempt is over, its launcher removes the copies that are left; the record goes last, so that a removal that
was cut short is found and repeated. Imports the standard library alone.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import uuid
from pathlib import Path

RECORD_FILE = "copies.jsonl"
_REMOVING = "removing"  # copies that lost their name and are being removed

Signature = tuple[tuple[str, int, int], ...]


def files_of(entry: Path) -> list[Path]:
    """Returns the files that an entry consists of: itself, or all below it."""
    if not entry.is_dir():
        return [entry]
    return sorted(path for path in entry.rglob("*") if path.is_file())


def signature(entry: Path) -> Signature:
    """Returns names, sizes and times of an entry's files: the same twice means that nothing wrote to it meanwhile.

    Raises:
        FileNotFoundError: it is gone, or something in it.
    """
    found = []
    for path in files_of(entry):
        status = path.stat()
        found.append((path.relative_to(entry.parent).as_posix(), status.st_size, status.st_mtime_ns))
    return tuple(found)


def complete_ns(path: Path) -> int:
    """Returns when anything at or below `path` last changed. The kernel sets `st_ctime`; programs cannot.

    Raises:
        FileNotFoundError: it is gone, or something in it.
    """
    below = (
        os.lstat(os.path.join(folder, name)).st_ctime_ns  # noqa: PTH118 (no Path for each of many files)
        for folder, folders, files in os.walk(path)
        for name in (*folders, *files)
    )
    return max(path.lstat().st_ctime_ns, max(below, default=0))


def record_checkpoint(folder: Path, entry: Path, of: Signature, complete_ns: int) -> None:
    """Records that the store has the checkpoint `entry` below a node's folder, as `of` describes it.

    Args:
        complete_ns: of `entry`, from before the store took it.

    Raises:
        OSError: the record cannot be written; the copy then stays until its job is removed.
    """
    _record(folder, entry, {"files": of, "complete_ns": complete_ns})


def record_input(folder: Path, path: Path, complete_ns: int) -> None:
    """Records that an input lies at `path` below a node's folder, complete since `complete_ns` (`st_ctime_ns`).

    Raises:
        OSError: the record cannot be written; the copy then stays until its job is removed.
    """
    _record(folder, path, {"complete_ns": complete_ns})


def _record(folder: Path, entry: Path, fields: dict[str, object]) -> None:
    top, real = os.path.realpath(folder), os.path.realpath(entry)
    if os.path.commonpath([top, real]) != top:
        return  # in a container, the job's folder is elsewhere, and goes with the pod
    line = json.dumps({"path": os.path.relpath(real, top), **fields})
    with (folder / RECORD_FILE).open("a") as file:
        file.write(f"{line}\n")


def remove_checkpoint(folder: Path, entry: Path, of: Signature, complete_ns: int) -> bool:
    """Removes a copy of a checkpoint whose files are those of `of` and which no process has open.

    Args:
        complete_ns: as it was recorded.

    Returns:
        Whether nothing is left to remove: False while a process reads it.
    """
    try:
        if not _is_unchanged(entry, complete_ns, of):
            return True  # other content, and no copy
        if any(map(_is_open, files_of(entry))):
            return False
    except FileNotFoundError:
        return True
    _remove(folder, entry, of)
    return True


def has_copies(folder: Path) -> bool:
    """Whether copies below a node's folder may be left."""
    return (folder / RECORD_FILE).exists()


def remove_all(folder: Path) -> None:
    """Removes every recorded copy below a node's folder in which nothing runs any more. May be repeated.

    Raises:
        OSError: something cannot be removed; the record stays, and all else is removed.
    """
    failed: OSError | None = None
    try:
        lines = (folder / RECORD_FILE).read_text().splitlines()
    except FileNotFoundError:
        return
    top = os.path.realpath(folder)
    for line in lines:
        try:
            fields = json.loads(line)
            entry, since_ns = folder / fields["path"], int(fields["complete_ns"])
            of = (
                tuple((str(name), int(size), int(time)) for name, size, time in fields["files"])
                if "files" in fields
                else None
            )
        except (ValueError, KeyError, TypeError):
            continue  # the agent was killed while it wrote this line
        if os.path.commonpath([top, os.path.realpath(entry)]) != top or os.path.realpath(entry) == top:
            continue  # a link of the job leads elsewhere
        try:
            shutil.rmtree(_beside(entry), ignore_errors=True)
            if _is_unchanged(entry, since_ns, of):
                _remove(folder, entry)
        except FileNotFoundError:
            continue
        except OSError as error:
            failed = error
    if failed is not None:
        raise failed
    shutil.rmtree(folder / _REMOVING, ignore_errors=True)
    (folder / RECORD_FILE).unlink()


def _is_unchanged(entry: Path, since_ns: int, of: Signature | None) -> bool:
    if entry.is_symlink() or complete_ns(entry) > since_ns or _has_mount(entry):
        return False
    return of is None or signature(entry) == of


def _has_mount(entry: Path) -> bool:
    """Whether something is mounted at or below an entry: what is in there is no part of the copy."""
    path = os.fsencode(os.path.realpath(entry))
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        at = re.sub(rb"\\([0-7]{3})", lambda found: bytes([int(found[1], 8)]), line.split()[4])
        if at == path or at.startswith(path + b"/"):
            return True
    return False


def _remove(folder: Path, entry: Path, of: Signature | None = None) -> None:
    """Takes the entry's name away at once, so that no reader finds a part of it, and then its bytes.

    Args:
        of: an entry that turns out to be another, because it was replaced just now, gets its name back.
    """
    trash = folder / _REMOVING / uuid.uuid4().hex
    trash.mkdir(parents=True)
    try:
        _remove_into(trash, entry, of)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        # A volume is mounted in the job's folder, and no rename leads out of it.
        beside = _beside(entry)
        beside.mkdir(exist_ok=True)  # a removal that was killed has left it
        _remove_into(beside, entry, of)
        shutil.rmtree(beside)
    shutil.rmtree(trash)


def _beside(entry: Path) -> Path:
    return entry.with_name(f".{_REMOVING}-{entry.name}")


def _remove_into(trash: Path, entry: Path, of: Signature | None) -> None:
    gone = trash / uuid.uuid4().hex / entry.name
    gone.parent.mkdir()
    try:
        entry.rename(gone)
    except FileNotFoundError:
        return
    if of is not None and signature(gone) != of:
        gone.rename(entry)
    elif gone.is_dir():
        shutil.rmtree(gone)
    else:
        gone.unlink()


def _is_open(path: Path) -> bool:
    """Whether another process has the file open or mapped: only otherwise the kernel grants a write lease."""
    with path.open("rb") as file:
        try:
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except BlockingIOError:
            return True
        except OSError:
            return False  # a file system without leases; what is open there is read to its end all the same
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False
