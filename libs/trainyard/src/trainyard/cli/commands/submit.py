"""Commands that take a job file: run, submit, render, schema."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from trainyard.cli.arguments import File, Output, source, with_client
from trainyard.cli.output import Format

if TYPE_CHECKING:
    from trainyard.client import AsyncClient
    from trainyard.client.documents import Document


def register(app: typer.Typer) -> None:
    for command in (run, submit, render, schema):
        app.command()(command)


Arguments = Annotated[
    list[str] | None, typer.Argument(metavar="[-- ARGUMENT...]", help="Appended to spec.command.", show_default=False)
]
Name = Annotated[str, typer.Option("--name", help="Name of the job, in place of metadata.name.", show_default=False)]
Assignments = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="spec.FIELD=VALUE",
        help="Set a field; VALUE is YAML, as in spec.resources.cpu=2. Can be repeated.",
        show_default=False,
    ),
]
Environment = Annotated[
    list[str] | None,
    typer.Option("--env", metavar="KEY=VALUE", help="Set a variable of spec.env. Can be repeated.", show_default=False),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Check the job, its code and its inputs, and show it with its place; nothing is stored."
    ),
]


def run(
    file: File,
    arguments: Arguments = None,
    name: Name = "",
    assignments: Assignments = None,
    env: Environment = None,
    dry_run: DryRun = False,
) -> None:
    """Run a job and stay with it: output, progress, summary.

    Uses the yard that is up, else starts one for as long as the job lives. The first Ctrl-C detaches, and the job goes
    on; the second offers to cancel it.
    """
    document = _document(file, arguments, name, assignments, env)
    if dry_run:
        from trainyard.cli.dry_run import dry_run_with_a_yard

        raise typer.Exit(dry_run_with_a_yard(document))
    from trainyard.cli.run.command import run_document

    raise typer.Exit(run_document(document))


def submit(
    file: File,
    arguments: Arguments = None,
    name: Name = "",
    assignments: Assignments = None,
    env: Environment = None,
    dry_run: DryRun = False,
    key: Annotated[str, typer.Option(help="Idempotency key: the same key always gives the same job.")] = "",
    output: Output = Format.TABLE,
) -> None:
    """Submit a job and leave it to the yard."""
    document = _document(file, arguments, name, assignments, env)
    if dry_run:
        from trainyard.cli.dry_run import check, show

        job = check(document)  # what is wrong with the file is told without a yard, too
        with_client(lambda client: show(client, document, job, output), reads=True)

    async def send(client: AsyncClient) -> None:
        from trainyard.cli import words
        from trainyard.cli.output import write
        from trainyard.cli.terminal import complain, next_steps, say

        answer = await client.submit_document(document, idempotency_key=key)
        if output.for_programs:
            write(answer, output)
            return
        job, identifier = answer.job, words.short(answer.job.id)
        say(f"{'submitted' if answer.created else 'submitted before'}: {job.name} ({job.id})")
        if job.pending.never_fits:
            complain(f"warning: it can never start ({job.pending.reason}): {job.pending.message}")
        next_steps(f"yard logs -f {identifier}", f"yard status {identifier}", f"yard explain {identifier}")

    with_client(send)


def _document(
    file: str, arguments: list[str] | None, name: str, assignments: list[str] | None, env: list[str] | None
) -> Document:
    from trainyard.client import documents

    document = documents.document(source(file))
    return documents.changed(
        document, name=name, assignments=assignments or (), env=env or (), arguments=arguments or ()
    )


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
