"""Joining the parts that several nodes made of one version."""

from __future__ import annotations

from collections.abc import Sequence

from servicekit.errors import FailedPrecondition
from trainyard.artifacts import ArtifactError, manifest
from trainyard_protos.v1 import artifacts_pb2 as pb


def join(requests: Sequence[pb.CommitRequest]) -> pb.CommitRequest:
    """One commit of all parts: files of all, cuts of all; everything else is the first part's.

    Raises:
        FailedPrecondition: two parts have different files under one path, are about different artifacts or steps, or do
            not make one tree.
    """
    whole = pb.CommitRequest()
    whole.CopyFrom(requests[0])
    files: dict[str, pb.File] = {}
    for request in requests:
        if (request.name, request.kind, request.checkpoint.step) != (whole.name, whole.kind, whole.checkpoint.step):
            raise FailedPrecondition(
                f"parts of '{whole.name}' disagree about name, kind or step",
                reason="PartsConflict",
                hint="give every version an idempotency key of its own",
            )
        _add_files(files, request)
        if request.HasField("checkpoint"):
            whole.checkpoint.cut.update(request.checkpoint.cut)
    try:
        whole.manifest.CopyFrom(manifest.make(files.values()))
    except ArtifactError as error:
        raise FailedPrecondition(error.message, reason=error.reason, hint=error.hint) from error
    return whole


def _add_files(files: dict[str, pb.File], request: pb.CommitRequest) -> None:
    for file in request.manifest.files:
        if files.setdefault(file.path, file) != file:
            raise FailedPrecondition(
                f"two nodes made different files '{file.path}' of one version",
                reason="PartsConflict",
                hint="let each node write names of its own, for instance with its rank in them",
            )
