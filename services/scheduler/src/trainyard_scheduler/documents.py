"""From the text a user wrote to what the scheduler stores of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from pydantic import ValidationError
from servicekit.errors import FailedPrecondition, InvalidArgument
from trainyard.spec import Kubernetes, Problem, SpecError, TrainingJob, load
from trainyard.spec.allowed import AllowedPods, not_allowed
from trainyard_protos.v1 import common_pb2

from trainyard_scheduler.domain.admission import Amount, Demand
from trainyard_scheduler.policy import policy_json, read_policy

_CACHED_CHARACTERS = 64 * 1024


class Resolved(NamedTuple):
    """A valid document, with what admission and retries need taken out."""

    name: str
    labels: tuple[tuple[str, str], ...]
    queue: str
    priority: int
    nodes: int
    workers_per_node: int
    per_worker: Amount
    policy: str
    spec: str
    kubernetes: Kubernetes | None = None

    @property
    def demand(self) -> Demand:
        return Demand(self.nodes, self.per_worker.times(self.workers_per_node), read_policy(self.policy).wishes)


def resolve(text: str, filename: str, packed_code: str, max_bytes: int) -> Resolved:
    """Reads and checks a document.

    Raises:
        InvalidArgument: it is wrong, with all of its problems; or it is larger than `max_bytes`.
        FailedPrecondition: CodeNotPacked: it names a folder of the user's machine and `packed_code` is empty.
    """
    _check_size(text, max_bytes)
    if len(text) > _CACHED_CHARACTERS:
        return _resolve(text, filename, packed_code)
    return _resolve_cached(text, filename, packed_code)


def resolve_for_plan(text: str, filename: str, max_bytes: int) -> Resolved:
    """As `resolve`, for a look ahead: code need not be packed.

    Raises:
        InvalidArgument: as `resolve`.
    """
    _check_size(text, max_bytes)
    return _extract(validate(text, filename))


def validate(text: str, filename: str) -> TrainingJob:
    """Reads a document.

    Raises:
        InvalidArgument: it is wrong, with all of its problems.
    """
    try:
        return load(text, filename)
    except SpecError as error:
        problems = [_to_proto(problem) for problem in error.problems]
        raise InvalidArgument(
            str(error),
            reason="InvalidSpec",
            hint="nothing was created; correct the document and submit again",
            problems=problems,
        ) from error


def _check_size(text: str, max_bytes: int) -> None:
    size = len(text.encode())
    if size > max_bytes:
        raise InvalidArgument(
            f"the document has {size} bytes, at most {max_bytes} are allowed",
            reason="DocumentTooLarge",
            hint="move data out of the document: into the code, an input artifact, or a file",
        )


def _resolve(text: str, filename: str, packed_code: str) -> Resolved:
    return _extract(_with_code(validate(text, filename), packed_code))


def _extract(job: TrainingJob) -> Resolved:
    cpu, memory_bytes, gpu = job.per_worker()
    return Resolved(
        name=job.metadata.name,
        labels=tuple(sorted(job.metadata.labels.items())),
        queue=job.spec.queue,
        priority=job.spec.priority,
        nodes=job.spec.nodes,
        workers_per_node=job.spec.workers_per_node,
        per_worker=Amount(round(cpu * 1000), memory_bytes, gpu),
        policy=policy_json(job),
        spec=job.to_json(),
        kubernetes=job.spec.kubernetes,
    )


def require_allowed(wishes: Kubernetes | None, filename: str, pools: Mapping[str, AllowedPods | None]) -> None:
    """Refuses a job that asks for what no pool allows; without pools, the launch decides.

    Args:
        pools: what each pool allows; None: anything.

    Raises:
        InvalidArgument: NotAllowed, with each field and what is allowed in the first pool.
    """
    problems: dict[str, list[Problem]] = {}
    for name, allowed in pools.items():
        found = list(not_allowed(wishes, allowed)) if wishes is not None and allowed is not None else []
        if not found:
            return
        problems[name] = found
    if not problems:
        return
    pool, first = next(iter(problems.items()))
    shown = [replace(problem, file=filename) for problem in first]
    raise InvalidArgument(
        "\n".join(map(str, shown)),
        reason="NotAllowed",
        hint=f"nothing was created; pool '{pool}' allows only what is named above",
        problems=[_to_proto(problem) for problem in shown],
    )


# The same text is submitted again and again: sweeps, tests, scripts in loops.
_resolve_cached = lru_cache(maxsize=256)(_resolve)


def _with_code(job: TrainingJob, packed_code: str) -> TrainingJob:
    path = job.spec.code.path if job.spec.code else None
    if path and not packed_code:
        raise FailedPrecondition(
            f"spec.code.path '{path}' is a folder of the submitting machine and was not packed",
            reason="CodeNotPacked",
            hint="pack it into an artifact and give its reference as packed_code ('yard submit' does)",
            fields={"path": path},
        )
    if packed_code and not path:
        raise InvalidArgument(
            "packed_code replaces spec.code.path, which this document does not have", reason="NothingToPack"
        )
    if not packed_code:
        return job
    try:
        return job.with_packed_code(packed_code)
    except ValidationError as error:
        raise InvalidArgument(
            f"packed_code '{packed_code}' is no artifact reference: name@version", reason="InvalidReference"
        ) from error


def _to_proto(problem: Problem) -> common_pb2.Problem:
    return common_pb2.Problem(
        file=problem.file,
        line=problem.line,
        field=problem.field,
        value=problem.value,
        message=problem.message,
        allowed=problem.allowed,
        suggestion=problem.suggestion,
    )
