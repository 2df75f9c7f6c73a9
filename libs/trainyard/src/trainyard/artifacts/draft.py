"""A tree while it is fetched: beside its target, complete in the end, and moved into place at once.

.<target>.partial/
    version     digest of the version that is fetched
    tree/       what of it is here; resumed when the same version is fetched again

The folder is locked while somebody works on it. All paths below it are relative to an open descriptor and no link is
followed; links are made last, so that nothing can be written through one.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trainyard_protos.v1 import artifacts_pb2 as pb

from trainyard.artifacts.errors import TargetBusy, TargetExists
from trainyard.artifacts.scan import opened

_VERSION = "version"
_TREE = "tree"
_MAX_NAME = 200  # bytes of the target's name that the draft's keeps


class Draft:
    """The files of one version that are on their way to `target`. Not for several threads at once."""

    def __init__(self, path: Path, target: Path) -> None:
        self._path = path
        self._target = target
        self.tree = path / _TREE

    def prepare(self, manifest: pb.Manifest, digest: bytes) -> bool:
        """Makes folders and empty files; whether something of this version may be here already."""
        version = self._path / _VERSION
        resumed = version.exists() and version.read_bytes() == digest
        if not resumed:
            version.unlink(missing_ok=True)
            shutil.rmtree(self.tree, ignore_errors=True)
            self.tree.mkdir()
            version.write_bytes(digest)
        with opened(self.tree) as folder:
            for parent in sorted({file.path.rpartition("/")[0] for file in manifest.files}):
                _make_folders(folder, parent)
            if resumed:
                _make_writable(folder, manifest)
        with self.writer() as writer:
            for file in manifest.files:
                if not file.symlink and not file.size:
                    writer.open(file)
        return resumed

    @contextmanager
    def writer(self) -> Iterator[Writer]:
        """For writing content into the tree's files."""
        with opened(self.tree) as folder:
            writer = Writer(folder)
            try:
                yield writer
            finally:
                writer.close()

    def complete(self, manifest: pb.Manifest) -> None:
        """Sets permissions and makes links: the tree is whole."""
        with opened(self.tree) as folder:
            for file in manifest.files:
                if file.symlink:
                    with suppress(FileExistsError):  # made before an interruption
                        os.symlink(file.symlink, file.path, dir_fd=folder)
                else:
                    os.chmod(file.path, file.mode, dir_fd=folder)
        self.tree.chmod(0o755)

    def move(self) -> None:
        """Makes the tree the target.

        Raises:
            TargetExists: something is there that was not before.
        """
        try:
            self.tree.rename(self._target)  # replaces an empty folder
        except OSError as error:
            raise TargetExists(f"{self._target} appeared meanwhile", hint="move it away, then try again") from error

    def move_entries(self) -> None:
        """Makes the top-level entries of the tree the target's.

        Raises:
            TargetExists: one of them is there that was not before.
        """
        self._target.mkdir(exist_ok=True)
        for entry in sorted(self.tree.iterdir()):
            if os.path.lexists(self._target / entry.name):
                raise TargetExists(f"{self._target / entry.name} appeared meanwhile", hint="choose another target")
            entry.rename(self._target / entry.name)

    def move_files(self, manifest: pb.Manifest) -> None:
        """Puts every file into its place in the target, one by one, over what is there."""
        with opened(self.tree) as tree, opened(self._target) as target:
            for file in manifest.files:
                _make_folders(target, file.path.rpartition("/")[0])
                os.replace(file.path, file.path, src_dir_fd=tree, dst_dir_fd=target)

    def discard(self) -> None:
        """Removes what is here."""
        shutil.rmtree(self._path, ignore_errors=True)


class Writer:
    """Writes content at offsets of files; keeps the last one open."""

    def __init__(self, folder: int) -> None:
        self._folder = folder
        self._path = ""
        self._descriptor = -1

    def open(self, file: pb.File) -> int:
        """The descriptor of a file, made in its whole size: what is not written is a hole."""
        if file.path != self._path:
            self.close()
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._descriptor = os.open(file.path, flags, 0o600, dir_fd=self._folder)
            self._path = file.path
            os.ftruncate(self._descriptor, file.size)
        return self._descriptor

    def write(self, file: pb.File, offset: int, content: bytes) -> None:
        """Puts content at its place in a file."""
        view = memoryview(content)
        while view:
            count = os.pwrite(self.open(file), view, offset)
            view, offset = view[count:], offset + count

    def close(self) -> None:
        """Closes the last file."""
        if self._path:
            os.close(self._descriptor)
            self._path = ""


@contextmanager
def beside(target: Path) -> Iterator[Draft]:
    """The draft of `target`, locked; it stays when it is not discarded, so that the next one goes on with it.

    Raises:
        TargetBusy: somebody else fetches into the same target.
    """
    name = target.name.encode(errors="surrogateescape")[:_MAX_NAME].decode(errors="ignore")
    path = target.parent / f".{name}.partial"
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor = _lock(path, target)
    try:
        yield Draft(path, target)
    finally:
        os.close(descriptor)


def _lock(path: Path, target: Path) -> int:
    while True:
        path.mkdir(mode=0o700, exist_ok=True)
        with suppress(FileNotFoundError):  # removed by whoever held it, who is done
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(descriptor), path.stat()):
                    return descriptor
            except BlockingIOError:
                os.close(descriptor)
                raise TargetBusy(
                    f"another download into {target} is running", hint="wait for it, or choose another target"
                ) from None
            except FileNotFoundError:
                pass
            os.close(descriptor)


def _make_folders(root: int, path: str) -> None:
    parts = path.split("/") if path else []
    for depth in range(len(parts)):
        with suppress(FileExistsError):
            os.mkdir("/".join(parts[: depth + 1]), 0o755, dir_fd=root)


def _make_writable(root: int, manifest: pb.Manifest) -> None:
    for file in manifest.files:
        if not file.symlink:
            with suppress(FileNotFoundError):
                os.chmod(file.path, 0o600, dir_fd=root)
