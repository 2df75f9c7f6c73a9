"""Files and names in folders, made durable."""

from __future__ import annotations

import errno
import os
import secrets
import tempfile
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Makes what was created, renamed or removed in a folder durable.

    Raises:
        OSError: there is no such folder, or the disk failed.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def require_writable(folder: Path) -> None:
    """Makes a folder when it is missing, and checks that files can be made in it.

    Raises:
        RuntimeError: this user may not write there. Any other error of the disk, for instance that it is full, is for
            whoever writes.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            return
        raise RuntimeError(_not_writable(folder, error)) from error


def _not_writable(folder: Path, error: OSError) -> str:
    existing = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    found = existing.stat()
    groups = ", ".join(map(str, sorted({os.getegid(), *os.getgroups()})))
    return (
        f"FolderNotWritable: this service keeps its files in {folder} and cannot write there ({error.strerror}): it "
        f"runs as user {os.geteuid()}, groups {groups}, and {existing} belongs to user {found.st_uid} and group "
        f"{found.st_gid} with mode {found.st_mode & 0o7777:04o}. On a cluster this is storage that ignores fsGroup, as "
        "NFS and hostPath do: run 'chown -R 65532:65532' on the folder of the volume, set podSecurityContext of the "
        "chart to a user who may write there, or use a storage class that applies fsGroup"
    )


def create_once(path: Path, content: bytes) -> bytes:
    """Content of a file that only its owner may read, made at first use and on disk on return.

    Safe when two processes begin at once, and at a power cut: the file is whole, or not there.

    Raises:
        OSError: it cannot be made or read.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, path)
    except FileExistsError:
        return path.read_bytes()
    finally:
        temporary.unlink()
    sync_folder(path.parent)
    return content
