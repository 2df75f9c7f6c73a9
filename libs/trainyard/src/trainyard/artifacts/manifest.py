"""Manifests: what a version is made of, and the digest that names it.

The canonical form is the protobuf encoding with files sorted by path (by code point), fields in the order of their
numbers and defaults left out; a manifest has no maps, so that the encoding is unique. A version's digest is the BLAKE3
hash of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

from trainyard_protos.v1 import artifacts_pb2 as pb

from trainyard.artifacts.errors import BadManifest
from trainyard.artifacts.paths import check_link, check_path

HASH_BYTES = 32
MAX_CHUNK_BYTES = 4 * 1024 * 1024
MAX_FILES = 100_000
MAX_MANIFEST_BYTES = 15 * 1024 * 1024  # a manifest travels in one message
_PERMISSIONS = 0o777


def make(files: Iterable[pb.File]) -> pb.Manifest:
    """A manifest of these files, sorted and checked.

    Raises:
        UnsafePath, BadManifest: see `check`.
    """
    manifest = pb.Manifest(files=sorted(files, key=lambda file: file.path))
    check(manifest)
    return manifest


def encode(manifest: pb.Manifest) -> bytes:
    """The canonical form."""
    return manifest.SerializeToString(deterministic=True)


def digest(encoded: bytes) -> bytes:
    """What names a version: the hash of its canonical manifest, 32 bytes."""
    from blake3 import blake3

    return blake3(encoded).digest()


def check(manifest: pb.Manifest) -> None:
    """Refuses a manifest that is not sorted, not consistent, or that could write outside of its tree.

    Raises:
        UnsafePath: a path or a link's target is not allowed.
        BadManifest: anything else, with the file it is about.
    """
    if len(manifest.files) > MAX_FILES:
        raise BadManifest(
            f"{len(manifest.files):,} files; at most {MAX_FILES:,} are allowed",
            hint="pack them into an archive, or split the tree",
        )
    for file in manifest.files:
        check_path(file.path)
        _check_content(file)
    for before, after in pairwise(manifest.files):
        if before.path >= after.path:
            raise BadManifest(f"{after.path!r} is listed twice or out of order", hint="sort files by path")
    _check_parents(manifest)
    if manifest.ByteSize() > MAX_MANIFEST_BYTES:
        raise BadManifest(
            f"the manifest is larger than {MAX_MANIFEST_BYTES >> 20} MiB", hint="fewer files, or split the tree"
        )


def _check_content(file: pb.File) -> None:
    if file.mode & ~_PERMISSIONS:
        raise BadManifest(f"{file.path!r} has mode {file.mode:o}", hint="only permission bits (at most 777) are kept")
    if file.symlink:
        if file.chunks or file.size:
            raise BadManifest(f"{file.path!r} is both a link and a file", hint="a link has no content")
        check_link(file.path, file.symlink)
        return
    for chunk in file.chunks:
        if len(chunk.hash) != HASH_BYTES or not 0 < chunk.size <= MAX_CHUNK_BYTES:
            raise BadManifest(
                f"{file.path!r} has a chunk of {chunk.size} bytes with a hash of {len(chunk.hash)} bytes",
                hint=f"chunks hold 1 to {MAX_CHUNK_BYTES} bytes and are named by {HASH_BYTES} bytes of BLAKE3",
            )
    if sum(chunk.size for chunk in file.chunks) != file.size:
        raise BadManifest(f"the chunks of {file.path!r} do not add up to its {file.size} bytes")


def _check_parents(manifest: pb.Manifest) -> None:
    # Without this, "a" could be a link and "a/b" be written through it.
    entries = {file.path for file in manifest.files}
    for path in entries:
        parent, _, _ = path.rpartition("/")
        while parent:
            if parent in entries:
                raise BadManifest(f"{parent!r} is a file or link, and also the folder of {path!r}")
            parent, _, _ = parent.rpartition("/")


def chunks(manifest: pb.Manifest) -> Iterator[tuple[pb.File, int, pb.ChunkRef]]:
    """Every chunk of every file, with its offset in the file."""
    return chunks_of(manifest.files)


def chunks_of(files: Iterable[pb.File]) -> Iterator[tuple[pb.File, int, pb.ChunkRef]]:
    """Every chunk of these files, with its offset in the file."""
    for file in files:
        offset = 0
        for chunk in file.chunks:
            yield file, offset, chunk
            offset += chunk.size


def hashes(manifest: pb.Manifest) -> set[bytes]:
    """The distinct chunks of a tree."""
    return {chunk.hash for file in manifest.files for chunk in file.chunks}


def total_size(manifest: pb.Manifest) -> int:
    """Bytes of all files."""
    return sum(file.size for file in manifest.files)
