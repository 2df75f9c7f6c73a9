"""Trees of files to and from the yard, with errors of this library."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import grpc
from trainyard_protos.v1 import artifacts_pb2 as pb

from trainyard import artifacts, errors
from trainyard.artifacts import Progress
from trainyard.client.connection import Connection
from trainyard.client.statuses import from_rpc


def unseen(done: int) -> None:
    """The progress of somebody who does not look."""


async def upload(
    connection: Connection,
    path: Path,
    workspace: str,
    name: str,
    *,
    kind: str,
    aliases: Sequence[str],
    labels: Mapping[str, str],
    inputs: Sequence[str],
    metrics: Mapping[str, float],
    progress: Progress,
) -> pb.Version:
    """Stores a folder, or a single file, as a new version of `name`."""
    folder = await asyncio.to_thread(path.is_dir)
    root, paths = (path, None) if folder else (path.parent, [Path(path.name)])
    with translated():
        return await artifacts.upload(
            connection.artifacts,
            root,
            paths,
            workspace=workspace,
            name=name,
            kind=kind,
            aliases=aliases,
            labels=labels,
            inputs=inputs,
            metrics=metrics,
            progress=progress,
        )


async def upload_files(
    connection: Connection,
    root: Path,
    paths: Sequence[Path],
    workspace: str,
    name: str,
    *,
    kind: str,
    labels: Mapping[str, str] | None = None,
) -> pb.Version:
    """Stores these files below `root` as a new version of `name`."""
    with translated():
        return await artifacts.upload(
            connection.artifacts, root, paths, workspace=workspace, name=name, kind=kind, labels=labels
        )


async def download(
    connection: Connection, reference: str, target: Path, workspace: str, *, sync: bool, progress: Progress
) -> pb.Version:
    """Writes the files of a version to `target`: a new folder, or with `sync` whatever is there."""
    fetch = artifacts.sync if sync else artifacts.download
    with translated():
        return await fetch(connection.artifacts, reference, target, workspace=workspace, progress=progress)


async def list_files(connection: Connection, reference: str, workspace: str, prefix: str) -> AsyncIterator[pb.File]:
    """Files of a version, by path."""
    with translated():
        async for file in artifacts.list_files(connection.artifacts, reference, workspace=workspace, prefix=prefix):
            yield file


async def read_file(
    connection: Connection, reference: str, path: str, workspace: str, offset: int, length: int
) -> AsyncIterator[bytes]:
    """The bytes of one file, as they come."""
    with translated():
        async for content in artifacts.read_file(
            connection.artifacts, reference, path, workspace=workspace, offset=offset, length=length
        ):
            yield content


@contextmanager
def translated() -> Iterator[None]:
    """Errors of transfers become errors of this library."""
    try:
        yield
    except (artifacts.ArtifactError, grpc.aio.AioRpcError, OSError) as error:
        raise _translate(error) from None


def _translate(error: Exception) -> Exception:
    match error:
        case grpc.aio.AioRpcError():
            return from_rpc(error)
        case artifacts.Damaged() | artifacts.BadManifest():
            return errors.Defect(error.message, reason=error.reason, hint=error.hint)
        case artifacts.TargetBusy() | artifacts.NoRoom():
            return errors.Conflict(error.message, reason=error.reason, hint=error.hint)
        case artifacts.ArtifactError():
            return errors.InvalidArgument(error.message, reason=error.reason, hint=error.hint)
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            return errors.Conflict(
                "the disk here is full", reason="DiskFull", hint="free space, then do it again: it goes on where it was"
            )
        case OSError():
            where = f"{error.filename}: " if error.filename else ""
            return errors.InvalidArgument(f"{where}{error.strerror}", reason="FileUnreadable")
        case _:
            return error
