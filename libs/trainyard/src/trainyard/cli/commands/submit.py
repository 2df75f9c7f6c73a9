"""Commands that take a job file: run, submit, render, schema."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from trainyard.cli.arguments import File, Output, source, with_client
from trainyard.cli.output import Format

if TYPE_CHECKING:
    from trainyard_protos.v1 import scheduler_pb2 as pb

    from trainyard.client import AsyncClient


def register(app: typer.Typer) -> None:
    for command in (run, submit, render, schema):
        app.command()(command)


def run(file: File) -> None:
    """Run a job and stay with it: output, progress, summary.

    Uses the yard that is up, else starts one for as long as the job lives. The first Ctrl-C detaches, and the job goes
    on; the second offers to cancel it.
    """
    from trainyard.cli.run.command import run_file

    raise typer.Exit(run_file(source(file)))


def submit(
    file: File,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show the resolved job, where it fits, and its place in the queue.")
    ] = False,
    key: Annotated[str, typer.Option(help="Idempotency key: the same key always gives the same job.")] = "",
    output: Output = Format.TABLE,
) -> None:
    """Submit a job and leave it to the yard."""
    document = source(file)
    if dry_run:
        from trainyard.client import documents
        from trainyard.client.code import resolved

        resolved(documents.document(document))  # what is wrong with the file is told without a yard, too

    async def plan(client: AsyncClient) -> None:
        from trainyard.cli.output import write

        answer = await client.plan(document)
        if output.for_programs:
            write(answer, output)
        else:
            _show_plan(answer, file)

    async def send(client: AsyncClient) -> None:
        from trainyard.cli import words
        from trainyard.cli.output import write
        from trainyard.cli.terminal import next_steps, say

        answer = await client.submit_document(document, idempotency_key=key)
        if output.for_programs:
            write(answer, output)
            return
        job, identifier = answer.job, words.short(answer.job.id)
        say(f"{'submitted' if answer.created else 'submitted before'}: {job.name} ({job.id})")
        next_steps(f"yard logs -f {identifier}", f"yard status {identifier}", f"yard explain {identifier}")

    with_client(plan if dry_run else send)


def _show_plan(answer: pb.PlanResponse, file: str) -> None:
    from trainyard.cli import words
    from trainyard.cli.terminal import next_steps, say

    say(answer.resolved.rstrip())
    say("---")
    if answer.placements:
        say("fits: " + ", ".join(f"node {place.node} on {place.machine}" for place in answer.placements))
    if answer.pending.reason:
        say(f"would wait: {answer.pending.reason}: {answer.pending.message}")
    else:
        say("would start at once")
    if answer.position:
        say(f"place in the queue: {answer.position}, with {words.plural(answer.jobs_ahead, 'job')} ahead")
    next_steps(f"yard run {file}", f"yard submit {file}")


def render(file: File) -> None:
    """Print the resolved job as `kubectl apply -f -` takes it; `code.path` is packed and stored first."""
    from trainyard.cli.terminal import say
    from trainyard.client.code import resolved
    from trainyard.client.documents import document

    found = document(source(file))
    job = resolved(found)
    if job.spec.code is None or job.spec.code.path is None:
        say(job.to_yaml().rstrip())
        return

    async def work(client: AsyncClient) -> None:
        say(job.with_packed_code(await client.pack(found)).to_yaml().rstrip())

    with_client(work)


def schema() -> None:
    """Print the JSON Schema of a job file, for editors."""
    import json

    from trainyard.cli.terminal import say
    from trainyard.spec.schema import json_schema

    say(json.dumps(json_schema(), indent=2))
