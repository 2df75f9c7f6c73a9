"""From the status of a gRPC call back to the errors of this library."""

from __future__ import annotations

import grpc
from trainyard_protos.v1 import common_pb2

from trainyard import errors

ERROR_KEY = "trainyard-error-bin"
PROBLEMS_KEY = "trainyard-problems-bin"

_CLASSES: dict[grpc.StatusCode, type[errors.YardError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidArgument,
    grpc.StatusCode.OUT_OF_RANGE: errors.InvalidArgument,
    grpc.StatusCode.NOT_FOUND: errors.NotFound,
    grpc.StatusCode.UNAVAILABLE: errors.NotRunning,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.NotRunning,
    grpc.StatusCode.UNAUTHENTICATED: errors.Refused,
    grpc.StatusCode.PERMISSION_DENIED: errors.Refused,
    grpc.StatusCode.ALREADY_EXISTS: errors.Conflict,
    grpc.StatusCode.FAILED_PRECONDITION: errors.Conflict,
    grpc.StatusCode.ABORTED: errors.Conflict,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.Exhausted,
}
# Not a service's words. A proxy cuts the streams of a service that died; and when a call ends while this side writes to
# it, gRPC gives its own word for the answer, which is lost.
_CUT = ("RST_STREAM", "Internal error from Core")
_HINTS = {
    errors.NotRunning: "see whether it runs with 'yard version', start it with 'yard up'",
    errors.Refused: "check the token: TRAINYARD_TOKEN, or the file 'token' in TRAINYARD_HOME",
    errors.Defect: "this is a defect of the yard; its log is in 'yard.log' in TRAINYARD_HOME",
}


def from_rpc(error: grpc.aio.AioRpcError) -> errors.YardError:
    """The error that a failed call stands for."""
    trailing = dict(error.trailing_metadata() or ())
    info = common_pb2.ErrorInfo.FromString(_binary(trailing.get(ERROR_KEY)))
    problems = common_pb2.Problems.FromString(_binary(trailing.get(PROBLEMS_KEY))).problems
    kind = from_code(error.code(), has_problems=bool(problems))
    if any(words in (error.details() or "") for words in _CUT):
        kind = errors.NotRunning
    if info.reason == errors.CodeNotPacked.__name__:
        kind = errors.CodeNotPacked
    return kind(
        error.details() or error.code().name,
        reason=info.reason,
        hint=info.hint or _HINTS.get(kind, ""),
        fields=info.fields,
        problems=tuple(problems),
    )


def from_code(code: grpc.StatusCode, *, has_problems: bool = False) -> type[errors.YardError]:
    """The class of the error for a status code, and whether it lists problems of a document."""
    return errors.InvalidSpec if has_problems else _CLASSES.get(code, errors.Defect)


def code_of(number: int) -> grpc.StatusCode:
    """The status code with this number on the wire; UNKNOWN when there is none."""
    return next((code for code in grpc.StatusCode if code.value[0] == number), grpc.StatusCode.UNKNOWN)


def _binary(value: str | bytes | None) -> bytes:
    return value if isinstance(value, bytes) else b""
