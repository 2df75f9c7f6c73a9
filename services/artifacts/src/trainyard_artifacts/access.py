"""Who may do what: users everything, attempts what their own job needs."""

from __future__ import annotations

from servicekit.auth import Principal, current_principal, require_workspace
from servicekit.errors import InvalidArgument, PermissionDenied
from trainyard_protos.v1 import artifacts_pb2 as pb

from trainyard_artifacts.domain.names import check_workspace

_ATTEMPT_KINDS = ("checkpoint", "output")
_MAX_ID = 128
_CHECKPOINTS = "checkpoints-"
"""Artifacts of that name and a job's id hold the checkpoints that job resumes from."""


def workspace_of(request_workspace: str) -> str:
    """The workspace a call is about, which the caller may use.

    Raises:
        PermissionDenied, InvalidArgument
    """
    return check_workspace(require_workspace(request_workspace))


def producer_of(given: pb.Producer) -> pb.Producer:
    """Who makes a version: an attempt is taken from its token, a user may name a job without a fence.

    Raises:
        PermissionDenied: an attempt claims to be another.
        InvalidArgument: BadProducer.
    """
    principal = current_principal()
    if principal.kind == "user":
        if max(len(given.job_id), len(given.attempt_id)) > _MAX_ID:
            raise InvalidArgument(
                f"the id of a job or attempt is longer than {_MAX_ID} characters",
                reason="BadProducer",
                hint="give the job's id as 'yard jobs' shows it",
            )
        return given
    own = pb.Producer(job_id=principal.job_id, attempt_id=principal.attempt_id, fence=principal.fence)
    if given.job_id not in ("", own.job_id) or given.attempt_id not in ("", own.attempt_id):
        raise _not_own(f"attempt {own.attempt_id} may not act for attempt {given.attempt_id} of job {given.job_id}")
    return own


def require_kind(kind: str) -> None:
    """Raises PermissionDenied when an attempt makes anything but checkpoints and outputs."""
    if current_principal().kind == "attempt" and kind not in _ATTEMPT_KINDS:
        raise _not_own(f"an attempt may not make a version of kind '{kind}', only {' and '.join(_ATTEMPT_KINDS)}")


def require_name(name: str) -> None:
    """Raises PermissionDenied when an attempt adds to another job's checkpoints."""
    principal = current_principal()
    if principal.kind == "attempt" and name.startswith(_CHECKPOINTS) and name != f"{_CHECKPOINTS}{principal.job_id}":
        raise _not_own(f"artifact '{name[:200]}' does not hold checkpoints of job {principal.job_id}")


def own_key(key: str) -> str:
    """An idempotency key as it is kept: an attempt can neither take nor meet a key of another job."""
    principal = current_principal()
    return f"{principal.job_id}/{key}" if principal.kind == "attempt" and key else key


def require_own(principal: Principal, version: pb.Version) -> None:
    """Raises PermissionDenied when an attempt changes what another job made."""
    if principal.kind == "attempt" and version.producer.job_id != principal.job_id:
        raise _not_own(f"version {version.id} was not made by job {principal.job_id}")


def _not_own(message: str) -> PermissionDenied:
    return PermissionDenied(message, reason="NotOwnJob", hint="an attempt's token is for its own job alone")
