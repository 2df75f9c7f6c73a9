"""Commands about jobs: jobs, jobs rm, status, events, explain, cancel, retry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from trainyard.cli.arguments import LAST, REFERENCE, DryRun, Job, Output, RequiredJob, Yes, complete_jobs, with_client
from trainyard.cli.output import Format

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trainyard_protos.v1 import scheduler_pb2

    from trainyard.client import AsyncClient


group = typer.Typer(help="List jobs, newest first; or remove some.", no_args_is_help=False)


def register(app: typer.Typer) -> None:
    group.callback(invoke_without_command=True)(jobs)
    group.command("rm")(rm)
    app.add_typer(group, name="jobs")
    for command in (status, events, explain, cancel, retry):
        app.command()(command)


def jobs(
    context: typer.Context,
    state: Annotated[list[str] | None, typer.Option(help="Only this state; can be given again.")] = None,
    queue: Annotated[str, typer.Option(help="Only this queue.")] = "",
    name: Annotated[str, typer.Option(help="Only names that contain this.")] = "",
    label: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="Only this label.")] = None,
    owned: Annotated[bool, typer.Option("--all", help="Also jobs of studies and pipelines.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 50,
    output: Output = Format.TABLE,
) -> None:
    """List jobs, newest first; or remove some."""
    if context.invoked_subcommand is not None:
        return
    labels = _labels(label or [])

    async def work(client: AsyncClient) -> None:
        from trainyard.cli import job_views
        from trainyard.cli.output import write

        found = [
            job
            async for job in client.list(
                states_in=state or [], queue=queue, name_contains=name, labels=labels, include_owned=owned, limit=limit
            )
        ]
        if output.for_programs:
            write(found, output)
        else:
            job_views.listing(found, wide=output is Format.WIDE)

    with_client(work, reads=True)


def rm(
    job: Annotated[
        list[str],
        typer.Argument(
            metavar="JOB...",
            help="Id, unique prefix of one, name of one job only, name#7, @last or @-2.",
            autocompletion=complete_jobs,
        ),
    ],
    yes: Yes = False,
    dry_run: DryRun = False,
    output: Output = Format.TABLE,
) -> None:
    """Remove jobs that have ended: attempt folders, logs, metrics and checkpoints. Outputs and code stay."""

    async def work(client: AsyncClient) -> int:
        from trainyard.cli.removing import remove

        return await remove(
            job,
            client.job_removal,
            client.remove_job,
            command="yard jobs rm",
            yes=yes,
            dry_run=dry_run,
            output=output,
        )

    with_client(work)


def status(job: Job = LAST, output: Output = Format.TABLE) -> None:
    """Show one job: its state, its attempts, what it uses."""

    async def work(client: AsyncClient) -> None:
        from trainyard.cli import job_views
        from trainyard.cli.output import write

        found = await client.get(job)
        if output.for_programs:
            write(found, output)
        else:
            job_views.detail(found, await job_views.live(client, found))

    with_client(work, reads=True)


def events(
    job: Annotated[str, typer.Argument(metavar="[JOB]", help=f"{REFERENCE} Without it, events of everything.")] = "",
    artifact: Annotated[str, typer.Option(metavar="NAME", help="Only what users changed of this artifact.")] = "",
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Then show events of jobs and pools as they happen.")
    ] = False,
    output: Output = Format.TABLE,
) -> None:
    """Show every change of jobs, pools, artifacts and the yard: who, what, when, why.

    With -o json, one object a line.
    """
    if artifact and (job or follow):
        raise typer.BadParameter("give either a job or an artifact; an artifact's events cannot be followed")

    async def work(client: AsyncClient) -> None:
        from trainyard.cli import job_views
        from trainyard.cli.output import write_line
        from trainyard.cli.terminal import complain

        show = write_line if output.for_programs else job_views.event
        if artifact:
            none = True
            async for event in client.admin_events("artifacts", object_name=artifact):
                show(event)
                none = False
            if none and not output.for_programs:
                complain(f"no user changed an artifact named '{artifact}'; 'yard artifacts list' shows what there is")
            return
        identifier = (await client.get(job)).id if job else ""
        seen = 0
        async for service, event in _events(client, identifier):
            show(event)
            seen = event.seq if service == "scheduler" else seen
        if follow:
            async for event in client.watch(identifier, seen):
                show(event)

    with_client(work, reads=not follow)


async def _events(client: AsyncClient, job_id: str) -> AsyncIterator[tuple[str, scheduler_pb2.Event]]:
    """Events so far of a job, or of everything; each with the service that keeps it."""
    if job_id:
        async for event in client.events(job_id):
            yield "scheduler", event
        return
    async for each in client.all_events():
        yield each.service, each.event


def explain(job: Job = LAST, output: Output = Format.TABLE) -> None:
    """Say why a job is in its state, and what would change it."""

    async def work(client: AsyncClient) -> None:
        from trainyard.cli import job_views
        from trainyard.cli.output import write

        answer = await client.explain(job)
        if output.for_programs:
            write(answer, output)
        else:
            job_views.explanation(answer, await job_views.live(client, answer.job))

    with_client(work, reads=True)


def cancel(
    job: Annotated[
        str,
        typer.Argument(
            metavar="JOB",
            help=f"{REFERENCE} A name selects its only job that has not ended.",
            autocompletion=complete_jobs,
        ),
    ],
    message: Annotated[str, typer.Option("-m", "--message", help="Why; shown with the job and its event.")] = "",
) -> None:
    """Stop a job: its processes get SIGTERM and their grace period."""

    async def work(client: AsyncClient) -> None:
        from trainyard.cli import words
        from trainyard.cli.terminal import next_steps, say
        from trainyard.client import states

        found = await client.cancel(job, message)
        say(f"{found.name} ({words.short(found.id)}) is {states.name(found.state)}")
        next_steps(f"yard status {words.short(found.id)}", f"yard events {words.short(found.id)}")

    with_client(work)


def retry(job: RequiredJob) -> None:
    """Put a failed or cancelled job back to the queue; it goes on from its last checkpoint."""

    async def work(client: AsyncClient) -> None:
        from trainyard.cli import words
        from trainyard.cli.terminal import next_steps, say
        from trainyard.client import states

        found = await client.retry(job)
        say(f"{found.name} ({words.short(found.id)}) is {states.name(found.state)}")
        next_steps(f"yard logs -f {words.short(found.id)}", f"yard status {words.short(found.id)}")

    with_client(work)


def _labels(pairs: list[str]) -> dict[str, str]:
    labels = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not key or not separator:
            raise typer.BadParameter(f"'{pair}' is not KEY=VALUE, for instance team=vision", param_hint="--label")
        labels[key] = value
    return labels
