"""Fetching a version: verified chunk by chunk, written beside the target, then moved into place.

Nothing is ever written outside of the target: paths are checked here again, and the tree is built in a new folder whose
only links are made last. A target is therefore complete and verified, or not there.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from trainyard_protos.v1 import artifacts_pb2 as pb

from trainyard.artifacts import manifest
from trainyard.artifacts.errors import Damaged, TargetExists
from trainyard.artifacts.parallel import each

if TYPE_CHECKING:
    from trainyard_protos.v1.artifacts_pb2_grpc import ArtifactServiceAsyncStub

CALL_TIMEOUT_S = 60.0
GET_TIMEOUT_S = 600.0
_GET_HASHES = 128
_GET_STREAMS = 2

Places = dict[bytes, list[tuple[str, int]]]  # chunk -> the files and offsets that hold it


async def download(
    stub: ArtifactServiceAsyncStub, reference: str, target: Path, *, workspace: str, merge: bool = False
) -> pb.Version:
    """Fetches the tree of a version into the folder `target`.

    Args:
        reference: "name", "name@alias", "name@3", "name@v3", or a version id.
        target: must not exist, or be an empty folder; with `merge`, a folder without any of the tree's top-level names.

    Raises:
        TargetExists: something is in the way; nothing was changed.
        Damaged: what came back is not what was stored; nothing was changed.
        UnsafePath, BadManifest: the manifest would write outside of the target.
        grpc.aio.AioRpcError: the store refused it (NOT_FOUND, DATA_LOSS, ...), or cannot be reached.
    """
    request = pb.GetVersionRequest(workspace=workspace, reference=reference)
    detail = await stub.GetVersion(request, timeout=CALL_TIMEOUT_S)
    _verify_manifest(detail)
    _check_target(target, detail.manifest, merge)
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        await _fetch(stub, detail, draft, workspace)
        await asyncio.to_thread(_finish, detail.manifest, draft)
        await asyncio.to_thread(_move, draft, target, merge)
    finally:
        await asyncio.to_thread(shutil.rmtree, draft, ignore_errors=True)
    return detail.version


def _verify_manifest(detail: pb.VersionDetail) -> None:
    manifest.check(detail.manifest)
    if manifest.digest(manifest.encode(detail.manifest)) != detail.version.digest:
        raise Damaged(
            f"the manifest of version {detail.version.id} does not match its digest", hint="the store's copy is damaged"
        )


def _check_target(target: Path, tree: pb.Manifest, merge: bool) -> None:
    if not target.exists() and not target.is_symlink():
        return
    if not target.is_dir() or target.is_symlink():
        raise TargetExists(f"{target} exists and is not a folder", hint="choose another target")
    present = {entry.name for entry in target.iterdir()}
    blocking = present & {file.path.partition("/")[0] for file in tree.files} if merge else present
    if blocking:
        raise TargetExists(
            f"{target} already holds {sorted(blocking)[0]!r}", hint="choose another target, or empty this one"
        )


async def _fetch(stub: ArtifactServiceAsyncStub, detail: pb.VersionDetail, draft: Path, workspace: str) -> None:
    await asyncio.to_thread(_create_files, detail.manifest, draft)
    places: Places = {}
    for file, offset, chunk in manifest.chunks(detail.manifest):
        places.setdefault(chunk.hash, []).append((file.path, offset))

    async def get(hashes: list[bytes]) -> None:
        await _fetch_chunks(stub, detail.version.id, hashes, places, draft, workspace)

    await each(_portions(list(places)), get, limit=_GET_STREAMS)


async def _fetch_chunks(
    stub: ArtifactServiceAsyncStub, version_id: str, hashes: list[bytes], places: Places, draft: Path, workspace: str
) -> None:
    request = pb.GetChunksRequest(workspace=workspace, version_id=version_id, hashes=hashes)
    wanted = set(hashes)
    async for chunk in stub.GetChunks(request, timeout=GET_TIMEOUT_S):
        if chunk.hash in wanted:
            await asyncio.to_thread(_write_chunk, chunk, places[chunk.hash], draft)
            wanted.discard(chunk.hash)
    if wanted:
        path, _ = places[wanted.pop()][0]
        raise Damaged(f"the store left out bytes of {path!r}", hint="try again; if it stays, the version is damaged")


def _write_chunk(chunk: pb.Chunk, places: list[tuple[str, int]], draft: Path) -> None:
    from blake3 import blake3

    if blake3(chunk.data).digest() != chunk.hash:
        raise Damaged(
            f"bytes of {places[0][0]!r} were damaged on the way", hint="try again; if it stays, the version is damaged"
        )
    for path, offset in places:
        descriptor = os.open(draft / path, os.O_WRONLY | os.O_NOFOLLOW)
        try:
            os.pwrite(descriptor, chunk.data, offset)
        finally:
            os.close(descriptor)


def _create_files(tree: pb.Manifest, draft: Path) -> None:
    for file in tree.files:
        path = draft / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        if not file.symlink:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))


def _finish(tree: pb.Manifest, draft: Path) -> None:
    for file in tree.files:
        path = draft / file.path
        if file.symlink:
            path.symlink_to(file.symlink)
        else:
            path.chmod(file.mode)
    draft.chmod(0o755)


def _move(draft: Path, target: Path, merge: bool) -> None:
    if not (merge and target.is_dir()):
        draft.rename(target)  # replaces an empty folder
        return
    for entry in sorted(draft.iterdir()):
        if os.path.lexists(target / entry.name):
            raise TargetExists(f"{target / entry.name} appeared meanwhile", hint="choose another target")
        entry.rename(target / entry.name)


def _portions(hashes: list[bytes]) -> Iterator[list[bytes]]:
    for start in range(0, len(hashes), _GET_HASHES):
        yield hashes[start : start + _GET_HASHES]
