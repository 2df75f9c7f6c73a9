"""Errors that services raise, one class per gRPC status.

    ServiceError
    ├── InvalidArgument     ├── NotFound            ├── AlreadyExists
    ├── FailedPrecondition  ├── Aborted             ├── OutOfRange
    ├── PermissionDenied    ├── Unauthenticated     ├── ResourceExhausted
    ├── Unavailable         ├── DeadlineExceeded    ├── DataLoss
    └── Internal

A servicer raises one; the server's interceptor sends its status, and in trailing metadata an `ErrorInfo` (stable reason
and hint) and the `Problems` of a refused document, which the client turns back into its own errors.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence

import grpc
from trainyard_protos.v1 import common_pb2

ERROR_KEY = "trainyard-error-bin"
PROBLEMS_KEY = "trainyard-problems-bin"

_MAX_MESSAGE = 4096
_MAX_PROBLEMS_BYTES = 256 * 1024


def _shortened(text: str) -> str:
    """A message may quote what the caller sent; what does not fit into the metadata would break the whole answer."""
    return text if len(text) <= _MAX_MESSAGE else f"{text[: _MAX_MESSAGE - 1]}…"


class ServiceError(Exception):
    """Root of all errors a service reports to its caller.

    Args:
        message: what is wrong and where.
        reason: stable CamelCase code, for programs.
        hint: what the caller can do next.
        fields: facts a program may want, as text.
        problems: what is wrong with a document, all at once.
    """

    code = grpc.StatusCode.UNKNOWN

    def __init__(
        self,
        message: str,
        *,
        reason: str,
        hint: str = "",
        fields: Mapping[str, str] | None = None,
        problems: Sequence[common_pb2.Problem] = (),
    ) -> None:
        self.message = _shortened(message)
        super().__init__(self.message)
        self.reason = reason
        self.hint = _shortened(hint)
        self.fields = {name: _shortened(value) for name, value in (fields or {}).items()}
        self.problems = tuple(problems)

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        """What travels beside the status."""
        info = common_pb2.ErrorInfo(reason=self.reason, hint=self.hint, fields=self.fields)
        metadata = [(ERROR_KEY, info.SerializeToString())]
        if self.problems:
            metadata.append((PROBLEMS_KEY, self._encoded_problems()))
        return tuple(metadata)

    def _encoded_problems(self) -> bytes:
        kept = common_pb2.Problems()
        room = _MAX_PROBLEMS_BYTES
        for problem in self.problems:
            room -= problem.ByteSize()
            if room < 0:
                break
            kept.problems.append(problem)
        return kept.SerializeToString()


class InvalidArgument(ServiceError):
    code = grpc.StatusCode.INVALID_ARGUMENT


class NotFound(ServiceError):
    code = grpc.StatusCode.NOT_FOUND


class AlreadyExists(ServiceError):
    code = grpc.StatusCode.ALREADY_EXISTS


class FailedPrecondition(ServiceError):
    code = grpc.StatusCode.FAILED_PRECONDITION


class Aborted(ServiceError):
    code = grpc.StatusCode.ABORTED


class OutOfRange(ServiceError):
    code = grpc.StatusCode.OUT_OF_RANGE


class PermissionDenied(ServiceError):
    code = grpc.StatusCode.PERMISSION_DENIED


class Unauthenticated(ServiceError):
    code = grpc.StatusCode.UNAUTHENTICATED


class ResourceExhausted(ServiceError):
    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class Unavailable(ServiceError):
    code = grpc.StatusCode.UNAVAILABLE


class DeadlineExceeded(ServiceError):
    code = grpc.StatusCode.DEADLINE_EXCEEDED


class DataLoss(ServiceError):
    code = grpc.StatusCode.DATA_LOSS


class Internal(ServiceError):
    code = grpc.StatusCode.INTERNAL


def reason_of(error: grpc.RpcError) -> str:
    """The stable reason a service gave, or "" when the error has none (for instance, a broken connection)."""
    metadata = dict(error.trailing_metadata() or ()) if isinstance(error, grpc.Call | grpc.aio.AioRpcError) else {}
    return common_pb2.ErrorInfo.FromString(metadata.get(ERROR_KEY, b"")).reason


def disk_failed(error: Exception, whose: str) -> ServiceError:
    """The error for a disk that did not take what a service was to store.

    Args:
        whose: the service, in words ("the artifact store").
    """
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ResourceExhausted(
            f"the disk of {whose} is full",
            reason="DiskFull",
            hint="free space; what was acknowledged is intact, the rest is to be sent again",
        )
    what = isinstance(error, OSError) and error.strerror
    return Unavailable(
        f"the disk of {whose} failed: {what or error}",
        reason="StorageFailed",
        hint="look at the disk, then try again",
    )


def attempt_ended(job_id: str, fence: int) -> FailedPrecondition:
    """The error for the token of an attempt that is over."""
    return FailedPrecondition(
        f"attempt {fence} of job {job_id} has ended: its token stores nothing more",
        reason="AttemptEnded",
        hint="end this process: it belongs to an attempt that is over",
        fields={"fence": str(fence)},
    )


def stale_fence(job_id: str, fence: int, highest: int) -> FailedPrecondition:
    """The error for an attempt that another one has replaced."""
    return FailedPrecondition(
        f"attempt {fence} of job {job_id} was replaced by attempt {highest}",
        reason="StaleFence",
        hint="end this attempt: another one has taken over",
        fields={"fence": str(fence), "highest": str(highest)},
    )
