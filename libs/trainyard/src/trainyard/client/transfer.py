"""Trees of files to and from the yard, with errors of this library."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import grpc
from trainyard_protos.v1 import artifacts_pb2 as pb

from trainyard import artifacts, errors
from trainyard.client.connection import Connection
from trainyard.client.statuses import from_rpc


async def upload(
    connection: Connection,
    path: Path,
    workspace: str,
    name: str,
    *,
    kind: str,
    aliases: Sequence[str],
    labels: Mapping[str, str],
) -> pb.Version:
    """Stores a folder, or a single file, as a new version of `name`."""
    folder = await asyncio.to_thread(path.is_dir)
    root, paths = (path, None) if folder else (path.parent, [Path(path.name)])
    return await upload_files(connection, root, paths, workspace, name, kind=kind, aliases=aliases, labels=labels)


async def upload_files(
    connection: Connection,
    root: Path,
    paths: Sequence[Path] | None,
    workspace: str,
    name: str,
    *,
    kind: str,
    aliases: Sequence[str] = (),
    labels: Mapping[str, str] | None = None,
) -> pb.Version:
    """Stores files below `root` (all of them: None) as a new version of `name`."""
    with _translated():
        return await artifacts.upload(
            connection.artifacts,
            root,
            paths,
            workspace=workspace,
            name=name,
            kind=kind,
            aliases=aliases,
            labels=labels,
        )


async def download(connection: Connection, reference: str, target: Path, workspace: str) -> pb.Version:
    """Writes the files of a version under `target`."""
    with _translated():
        return await artifacts.download(connection.artifacts, reference, target, workspace=workspace)


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except ExceptionGroup as group:
        # Parallel transfers fail together; one of them tells what is wrong.
        raise _translate(_first(group)) from None
    except (artifacts.ArtifactError, grpc.aio.AioRpcError, OSError) as error:
        raise _translate(error) from None


def _first(error: Exception) -> Exception:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def _translate(error: Exception) -> Exception:
    match error:
        case grpc.aio.AioRpcError():
            return from_rpc(error)
        case artifacts.Damaged() | artifacts.BadManifest():
            return errors.Defect(error.message, reason=error.reason, hint=error.hint)
        case artifacts.ArtifactError():
            return errors.InvalidArgument(error.message, reason=error.reason, hint=error.hint)
        case OSError():
            where = f"{error.filename}: " if error.filename else ""
            return errors.InvalidArgument(f"{where}{error.strerror}", reason="FileUnreadable")
        case _:
            return error
