"""Whether a file or folder that looks like a checkpoint is a whole one."""

from __future__ import annotations

import fcntl
import json
import os
import re
import struct
from pathlib import Path

from trainyard.copies import Signature, files_of

_ZIP_START = b"PK\x03\x04"
_ZIP_END = struct.Struct("<4s4H2IH")
_LONGEST_COMMENT = 65_535
_MAX_SAFETENSORS_HEADER = 100_000_000


def changed_ns(of: Signature) -> int:
    """When any of it last changed."""
    return max((changed for _, _, changed in of), default=0)


def is_whole(entry: Path) -> bool:
    """Whether nobody has the entry open for writing, and everything in it is complete for what it is.

    Raises:
        OSError: it is gone, or cannot be read.
    """
    files = files_of(entry)
    names = {path.name for path in files}
    if any(name.endswith(".distcp") for name in names) and ".metadata" not in names:
        return False  # torch.distributed.checkpoint writes .metadata last
    return any(path.stat().st_size for path in files) and all(_file_is_whole(path) for path in files)


def is_sharded(entry: Path) -> bool:
    """Whether every node writes a part of it (torch.distributed.checkpoint, DeepSpeed, trainkit), or one all of it."""
    if not entry.is_dir():
        return False
    names = {path.name for path in files_of(entry)}
    return any(name.endswith(".distcp") or "zero_pp_rank_" in name for name in names) or _lacks_ranks(entry, names)


def _lacks_ranks(entry: Path, names: set[str]) -> bool:
    """Whether it is of trainkit, and files of other processes are elsewhere. On a disk that all see it is whole."""
    if not any(re.fullmatch(r"rank-\d+\.safetensors", name) for name in names):
        return False
    try:
        files = json.loads((entry / "manifest.json").read_text())["files"]
        return any(file["name"] not in names for file in files)
    except FileNotFoundError:
        return True
    except (ValueError, KeyError, TypeError):
        return False  # another's files


def _file_is_whole(path: Path) -> bool:
    with path.open("rb") as file:
        if not _closed(file.fileno()):
            return False
        start = file.read(8)
        if start.startswith(_ZIP_START) and path.suffix in (".pt", ".pth", ".ckpt", ".bin", ".zip", ".npz"):
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - _ZIP_END.size - _LONGEST_COMMENT))
            return _has_zip_end(file.read())
        if path.suffix == ".safetensors":
            return _is_safetensors(path, start)
    return True


def _closed(descriptor: int) -> bool:
    """Whether nobody has the file open for writing: only then the kernel grants a read lease."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system without leases: that it did not change has to do
    fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return True


def _has_zip_end(tail: bytes) -> bool:
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or len(tail) - at < _ZIP_END.size:
        return False
    comment = _ZIP_END.unpack_from(tail, at)[-1]
    return bool(at + _ZIP_END.size + comment == len(tail))


def _is_safetensors(path: Path, start: bytes) -> bool:
    if len(start) < 8:
        return False
    length = int.from_bytes(start, "little")
    if length > _MAX_SAFETENSORS_HEADER:
        return False
    with path.open("rb") as file:
        file.seek(8)
        header = file.read(length)
    try:
        tensors = json.loads(header)
        ends = [entry["data_offsets"][1] for name, entry in tensors.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return False
    return bool(8 + length + max(ends, default=0) == path.stat().st_size)
