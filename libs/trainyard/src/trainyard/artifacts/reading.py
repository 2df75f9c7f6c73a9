"""Looking into a version without fetching it: its files, and the bytes of one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from trainyard_protos.v1 import artifacts_pb2 as pb

from trainyard.artifacts.calls import CALL_TIMEOUT_S, FULL, MOVE_TIMEOUT_S, Pace, patiently

if TYPE_CHECKING:
    from trainyard_protos.v1.artifacts_pb2_grpc import ArtifactServiceAsyncStub

_PAGE = 5000


async def version(stub: ArtifactServiceAsyncStub, reference: str, *, workspace: str, pace: Pace = FULL) -> pb.Version:
    """The version that a reference names now, without its files.

    Raises:
        grpc.aio.AioRpcError: there is no such version (NOT_FOUND), or the yard stays away.
    """
    request = pb.GetVersionRequest(workspace=workspace, reference=reference, without_manifest=True)
    return (await patiently(lambda: stub.GetVersion(request, timeout=CALL_TIMEOUT_S), pace.patience_s)).version


async def list_files(
    stub: ArtifactServiceAsyncStub, reference: str, *, workspace: str, prefix: str = "", pace: Pace = FULL
) -> AsyncIterator[pb.File]:
    """Files of one version, by path, without their chunks.

    Args:
        prefix: only paths that begin with this.

    Raises:
        as `version`.
    """
    found = await version(stub, reference, workspace=workspace, pace=pace)
    request = pb.ListFilesRequest(workspace=workspace, reference=found.id, prefix=prefix, page_size=_PAGE)
    while True:
        page = await patiently(lambda: stub.ListFiles(request, timeout=CALL_TIMEOUT_S), pace.patience_s)
        for file in page.files:
            yield file
        if not page.next_page_token:
            return
        request.page_token = page.next_page_token


async def read_file(
    stub: ArtifactServiceAsyncStub,
    reference: str,
    path: str,
    *,
    workspace: str,
    offset: int = 0,
    length: int = 0,
    pace: Pace = FULL,
) -> AsyncIterator[bytes]:
    """The bytes of one file, verified by the store, as they come; goes on where it was when the yard was away.

    Args:
        offset: in bytes, of the first one wanted.
        length: how many are wanted; 0: to the end.

    Raises:
        grpc.aio.AioRpcError: no such version or file (NOT_FOUND), damaged (DATA_LOSS), beyond the file's end
            (OUT_OF_RANGE), or the yard stays away.
    """
    found = await version(stub, reference, workspace=workspace, pace=pace)  # an alias may move meanwhile
    request = pb.ReadFileRequest(workspace=workspace, reference=found.id, path=path, offset=offset)
    end = offset + length if length else None
    while end is None or request.offset < end:
        request.length = pace.page_bytes if end is None else min(pace.page_bytes, end - request.offset)
        content = await patiently(lambda: _read_range(stub, request), pace.patience_s)
        if content:
            yield content
        if len(content) < request.length:
            return
        request.offset += len(content)


async def _read_range(stub: ArtifactServiceAsyncStub, request: pb.ReadFileRequest) -> bytes:
    return b"".join([answer.data async for answer in stub.ReadFile(request, timeout=MOVE_TIMEOUT_S)])
