"""Fetching a version: verified chunk by chunk, written beside the target, then moved into place.

Nothing is ever written outside of the target. A download that was cut goes on where it stopped: call it again. Bytes
are not forced to the disk: after a loss of power, fetch again.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING

from trainyard_protos.v1 import artifacts_pb2 as pb

from trainyard.artifacts.calls import FULL, Pace, Progress, ignore
from trainyard.artifacts.draft import beside
from trainyard.artifacts.errors import TargetExists
from trainyard.artifacts.fetch import fill, find
from trainyard.artifacts.local import Supply, present
from trainyard.artifacts.scan import opened
from trainyard.artifacts.upload import describe

if TYPE_CHECKING:
    from trainyard_protos.v1.artifacts_pb2_grpc import ArtifactServiceAsyncStub


async def download(
    stub: ArtifactServiceAsyncStub,
    reference: str,
    target: Path,
    *,
    workspace: str,
    merge: bool = False,
    pace: Pace = FULL,
    progress: Progress = ignore,
) -> pb.Version:
    """Fetches the tree of a version into the folder `target`, which appears at once: whole and verified, or not at all.

    What an interrupted download of the same version into the same target had fetched is not fetched again.

    Args:
        reference: "name", "name@alias", "name@3", "name@v3", or a version id.
        target: must not exist, or be an empty folder; with `merge`, a folder without any of the tree's top-level names.
        progress: told how many more bytes are there.

    Raises:
        TargetExists: something is in the way; nothing was changed.
        TargetBusy: another download into the same target is running.
        NoRoom: the disk is too small for it; nothing was changed.
        Damaged: what came back is not what was stored; nothing was changed.
        UnsafePath, BadManifest: the manifest would write outside of the target.
        grpc.aio.AioRpcError: the store refused it (NOT_FOUND, DATA_LOSS, ...), or stayed away.
    """
    source, tree = await find(stub, workspace, reference, pace, progress)
    await asyncio.to_thread(_check_target, target, tree, merge)
    with beside(target) as draft:
        await fill(source, tree, draft)
        await asyncio.to_thread(draft.move_entries if merge else draft.move)
        await asyncio.to_thread(draft.discard)
    return source.version


async def sync(
    stub: ArtifactServiceAsyncStub,
    reference: str,
    target: Path,
    *,
    workspace: str,
    pace: Pace = FULL,
    progress: Progress = ignore,
) -> pb.Version:
    """Makes the files of a version those of the folder `target`, fetching only what differs.

    What is there is read and hashed, and equal content is taken from there. When all is fetched, files are replaced one
    after the other, each at once. Other files in the folder stay.

    Raises:
        TargetExists: a file is where a folder has to be, or the other way round; nothing was changed.
        FileChanged: a file of the folder changed meanwhile; nothing was changed.
        as `download` else.
    """
    source, tree = await find(stub, workspace, reference, pace, progress)
    await asyncio.to_thread(target.mkdir, parents=True, exist_ok=True)
    here = {file.path: file for file in (await describe(target, await asyncio.to_thread(_paths, target, tree))).files}
    other = [file for file in tree.files if not _same_content(file, here.get(file.path))]
    progress(source.version.size - sum(file.size for file in other))
    changed = pb.Manifest(files=other)
    with beside(target) as draft:
        await fill(source, changed, draft, Supply(target, here.values()))
        await asyncio.to_thread(draft.move_files, changed)
        await asyncio.to_thread(_set_modes, target, tree, here)
        await asyncio.to_thread(draft.discard)
    return source.version


def _paths(target: Path, tree: pb.Manifest) -> list[Path]:
    return [Path(path) for path in present(target, tree)]


def _same_content(file: pb.File, here: pb.File | None) -> bool:
    return here is not None and not file.symlink and list(file.chunks) == list(here.chunks)


def _set_modes(target: Path, tree: pb.Manifest, here: dict[str, pb.File]) -> None:
    with opened(target) as folder:
        for file in tree.files:
            if file.path in here and here[file.path].mode != file.mode:
                os.chmod(file.path, file.mode, dir_fd=folder)


def _check_target(target: Path, tree: pb.Manifest, merge: bool) -> None:
    if not target.exists() and not target.is_symlink():
        return
    if not target.is_dir() or target.is_symlink():
        raise TargetExists(f"{target} exists and is not a folder", hint="choose another target")
    entries = {entry.name for entry in target.iterdir()}
    blocking = entries & {file.path.partition("/")[0] for file in tree.files} if merge else entries
    if blocking:
        raise TargetExists(
            f"{target} already holds {sorted(blocking)[0]!r}",
            hint="choose another target, or empty this one, or give --sync (from Python: sync=True)",
        )
