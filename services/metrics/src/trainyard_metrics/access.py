"""Who may do what: users everything, attempts what concerns their own job, and writing to their own run alone."""

from __future__ import annotations

import re

from servicekit.auth import current_principal, require_workspace
from servicekit.errors import InvalidArgument, PermissionDenied
from trainyard_protos.v1 import metrics_pb2 as pb

_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


def check_run_id(run_id: str) -> str:
    """Raises InvalidArgument unless `run_id` is a UUID in lower case: ids name folders."""
    if not _UUID.fullmatch(run_id):
        raise InvalidArgument(
            f"'{run_id[:64]}' is not a run id", reason="BadRunId", hint="use the attempt's id, or a new UUIDv7"
        )
    return run_id


def own_run(run: pb.Run) -> pb.Run:
    """A run to be opened, as its caller may open it.

    Raises:
        PermissionDenied: an attempt opens another's run.
    """
    principal = current_principal()
    run.workspace = require_workspace(run.workspace)
    if principal.kind != "user":
        given = (run.id, run.job_id or principal.job_id, run.fence or principal.fence)
        if given != (principal.attempt_id, principal.job_id, principal.fence):
            raise _not_own(f"attempt {principal.attempt_id} may not open run {run.id}")
        run.job_id, run.fence = principal.job_id, principal.fence
    return run


def require_writer(run_id: str) -> None:
    """Raises PermissionDenied when an attempt, or who delivers for it, writes to another's run."""
    principal = current_principal()
    if principal.kind != "user" and run_id != principal.attempt_id:
        raise _not_own(f"attempt {principal.attempt_id} may not write to run {run_id}")


def require_reader(workspace: str, job_id: str) -> str:
    """The workspace of a question about a job ("": about many), which the caller may ask.

    Raises:
        PermissionDenied
    """
    principal = current_principal()
    if principal.kind != "user" and job_id != principal.job_id:
        raise _not_own(f"an attempt of job {principal.job_id} may not read job '{job_id}'")
    return require_workspace(workspace)


def _not_own(message: str) -> PermissionDenied:
    return PermissionDenied(message, reason="NotOwnJob", hint="an attempt's token is for its own run and job alone")
