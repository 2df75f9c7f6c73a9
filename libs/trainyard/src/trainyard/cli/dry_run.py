"""`--dry-run`: everything that a submission would find, without storing anything."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from trainyard.cli import words
from trainyard.cli.output import Format, write
from trainyard.cli.terminal import complain, say
from trainyard.client.code import code_files, left_out, resolved, results_of
from trainyard.errors import InvalidSpec, NeverFits, NotFound

if TYPE_CHECKING:
    from trainyard_protos.v1 import artifacts_pb2
    from trainyard_protos.v1 import scheduler_pb2 as pb

    from trainyard.client import AsyncClient
    from trainyard.client.documents import Document
    from trainyard.spec import TrainingJob


def dry_run_with_a_yard(document: Document) -> int:
    """What `yard run` would do, with the yard that it would use; returns the exit code of `yard run --dry-run`.

    Raises:
        InvalidSpec: the document is wrong, or an input does not exist.
        InvalidArgument: the code cannot be packed.
        NeverFits: no machine can hold the job.
    """
    from trainyard import home
    from trainyard.cli.arguments import with_client
    from trainyard.cli.run.command import with_a_yard

    job = check(document)

    def rest(client: AsyncClient) -> Coroutine[Any, Any, int]:
        return show(client, document, job, Format.TABLE)

    if home.has_data(home.home()):
        with_client(rest, reads=True)
    return with_a_yard(rest)


def check(document: Document) -> TrainingJob:
    """What can be checked without a yard: the document, and the code that would be packed.

    Raises:
        InvalidSpec: the document is wrong.
        InvalidArgument: the folder of the code is missing, too large, or holds what cannot be stored.
    """
    job = resolved(document)
    code_files(document, job)
    return job


async def show(client: AsyncClient, document: Document, job: TrainingJob, output: Format) -> int:
    """Checks the rest with a yard and shows the outcome.

    Raises:
        InvalidSpec: an input does not exist.
        NeverFits: no machine can hold the job.
    """
    inputs = await _inputs(client, document, job)
    plan = await client.plan(document)
    if output.for_programs:
        write(plan, output)
    else:
        say(plan.resolved.rstrip())
        say("---")
        await asyncio.to_thread(_show_code, document, job)
        for found in inputs:
            say(f"input: {found.name}@{found.number} ({words.size(found.size)})")
        _show_place(plan)
    if plan.pending.never_fits:
        raise NeverFits(
            f"it can never start ({plan.pending.reason}): {plan.pending.message}",
            reason=plan.pending.reason,
            hint="change the job file; nothing was submitted",
        )
    return 0


async def _inputs(client: AsyncClient, document: Document, job: TrainingJob) -> list[artifacts_pb2.Version]:
    from trainyard.spec import Problem

    found, problems = [], []
    for index, wanted in enumerate(job.spec.inputs):
        try:
            found.append(await client.artifact(wanted.artifact))
        except NotFound as error:
            field = f"spec.inputs[{index}].artifact"
            problems.append(Problem(document.filename, 0, field, wanted.artifact, f"{error.message} ({error.hint})"))
    if problems:
        raise InvalidSpec("inputs do not exist", reason="InputNotFound", problems=problems)
    return found


def _show_code(document: Document, job: TrainingJob) -> None:
    packed = code_files(document, job)
    if packed is None:
        return
    root, files = packed
    size = sum((root / path).lstat().st_size for path in files.packed)
    say(f"code: {words.plural(len(files.packed), 'file')} ({words.size(size)}) of {root}")
    for note in left_out(files, results_of(job.spec)):
        complain(note)


def _show_place(plan: pb.PlanResponse) -> None:
    if plan.placements:
        say("fits: " + ", ".join(f"node {place.node} on {place.machine}" for place in plan.placements))
    if plan.pending.reason:
        say(f"would wait: {plan.pending.reason}: {plan.pending.message}")
    else:
        say("would start at once")
    if plan.position:
        say(f"place in the queue: {plan.position}, with {words.plural(plan.jobs_ahead, 'job')} ahead")
