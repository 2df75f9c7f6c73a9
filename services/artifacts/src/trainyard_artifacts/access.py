"""Who may do what: users everything, attempts what their job declares."""

from __future__ import annotations

from collections.abc import Sequence

from servicekit.auth import Principal, current_principal
from servicekit.errors import InvalidArgument, PermissionDenied, Unavailable
from servicekit.grants import Grants
from trainyard_protos.v1 import artifacts_pb2 as pb

from trainyard_artifacts.tables import VersionRow

_ATTEMPT_KINDS = ("checkpoint", "output")
_MAX_ID = 128
_MAX_SHOWN = 200  # characters of what a caller sent, in a message
_CHECKPOINTS = "checkpoints-"
"""Artifacts of that name and a job's id hold the checkpoints that job resumes from."""


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


def require_writable(request: pb.CommitRequest) -> None:
    """Checks that an attempt makes what its job declares: checkpoints or an output, without aliases.

    Raises:
        PermissionDenied: it makes something else.
        Unavailable: the token was minted by an older version and does not say what the outputs are.
    """
    principal = current_principal()
    if principal.kind == "user":
        return
    if request.kind not in _ATTEMPT_KINDS:
        raise _not_own(
            f"an attempt may not make a version of kind '{request.kind}', only {' and '.join(_ATTEMPT_KINDS)}"
        )
    require_no_alias(request.aliases)
    name = request.name[:_MAX_SHOWN]
    if request.kind == "checkpoint" or name.startswith(_CHECKPOINTS):
        if (request.kind, name) != ("checkpoint", _own_checkpoints(principal)):
            raise _not_own(f"artifact '{name}' does not hold checkpoints of job {principal.job_id}")
    elif not _grants(principal).may_write(name):
        raise PermissionDenied(
            f"artifact '{name}' is not an output of job {principal.job_id}",
            reason="NotGranted",
            hint=f"declare it in the job: spec.outputs, with 'artifact: {name}' and the path that holds the files",
        )


def require_no_alias(aliases: Sequence[str]) -> None:
    """Raises PermissionDenied when an attempt moves an alias: which version they name is for users to decide."""
    if current_principal().kind != "user" and aliases:
        raise PermissionDenied(
            f"an attempt may not move the alias '{aliases[0][:_MAX_SHOWN]}'",
            reason="NotGranted",
            hint="'latest' moves when the job succeeds; users move other aliases: yard artifacts tag",
        )


def may_read(principal: Principal, row: VersionRow) -> bool:
    """Whether a caller may read a version: users all, attempts their job's inputs, code and what the job made.

    Raises:
        Unavailable: the token was minted by an older version and does not say what the inputs are.
    """
    if principal.kind == "user" or row.job_id == principal.job_id:
        return True
    grants = _grants(principal)
    return grants.may_read(row.name) or grants.may_read(row.id)


def require_readable(principal: Principal, row: VersionRow) -> None:
    """Raises PermissionDenied when the caller may not read a version, Unavailable as `may_read`."""
    if not may_read(principal, row):
        raise _unreadable(principal, f"artifact '{row.name}'")


def require_listed(name: str, job_id: str) -> None:
    """Checks that an attempt lists what its own job made, or versions of an artifact that it may read.

    Raises:
        PermissionDenied: it lists something else. Unavailable: as `may_read`.
    """
    principal = current_principal()
    if principal.kind == "user" or job_id == principal.job_id or name == _own_checkpoints(principal):
        return
    if not name or not _grants(principal).may_read(name):
        raise _unreadable(principal, f"artifact '{name[:_MAX_SHOWN]}'" if name else "the list of all artifacts")


def own_key(key: str) -> str:
    """An idempotency key as it is kept: an attempt can neither take nor meet a key of another job."""
    principal = current_principal()
    return f"{principal.job_id}/{key}" if principal.kind == "attempt" and key else key


def _own_checkpoints(principal: Principal) -> str:
    return f"{_CHECKPOINTS}{principal.job_id}"


def _grants(principal: Principal) -> Grants:
    if principal.grants is None:
        # Not a refusal: the attempt began under an older launcher, which renews the token soon.
        raise Unavailable(
            "this attempt's token does not say which artifacts its job declares: an older version of Trainyard made it",
            reason="TokenTooOld",
            hint="try again: the launcher renews the token once it runs this version",
        )
    return principal.grants


def _unreadable(principal: Principal, what: str) -> PermissionDenied:
    return PermissionDenied(
        f"{what} is not an input of job {principal.job_id}, and not its code or made by it",
        reason="NotGranted",
        hint="declare it in the job: spec.inputs, with the path where it is unpacked; or list with the job's own id",
    )


def _not_own(message: str) -> PermissionDenied:
    return PermissionDenied(message, reason="NotOwnJob", hint="an attempt's token is for its own job alone")
