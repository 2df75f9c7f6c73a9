"""Commands about runs: runs list, runs show, runs rm, compare."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from trainyard.cli.arguments import DryRun, Of, Output, Yes, complete_jobs, with_client
from trainyard.cli.output import Format

if TYPE_CHECKING:
    from trainyard.client import AsyncClient

group = typer.Typer(help="Runs of jobs and of plain scripts: list, show, remove.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    for name, command in (("list", list_), ("show", show), ("rm", rm)):
        group.command(name)(command)
    app.add_typer(group, name="runs")
    app.command()(compare)


def list_(
    filter: Annotated[
        str,
        typer.Argument(
            metavar="[FILTER]",
            help="For instance: 'metrics.loss < 0.1 and params.lr in (0.1, 0.2) and tags.team = \"vision\"'.",
        ),
    ] = "",
    order_by: Annotated[
        str, typer.Option(metavar="FIELDS", help="For instance 'metrics.loss, created desc'; default: newest first.")
    ] = "",
    metric: Annotated[
        list[str] | None, typer.Option("-m", "--metric", help="Show the last value of this series; can be given again.")
    ] = None,
    attempts: Annotated[
        bool, typer.Option("--all-attempts", help="Also the runs of earlier attempts of a job.")
    ] = False,
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 50,
    output: Output = Format.TABLE,
) -> None:
    """List runs that match a filter.

    Its fields: metrics.*, params.*, spec.*, tags.*, id, job, name, notes, attempt, created, updated.
    Times are in UTC unless they name an offset: "2026-11-20T10:30+01:00".
    """

    async def work(client: AsyncClient) -> None:
        from trainyard.cli import run_views
        from trainyard.cli.output import write

        names = metric or []
        found = [
            run async for run in client.runs(filter, order_by=order_by, names=names, all_attempts=attempts, limit=limit)
        ]
        if output.for_programs:
            write(found, output)
        else:
            run_views.listing(found, names)

    with_client(work, reads=True)


def show(of: Of, output: Output = Format.TABLE) -> None:
    """Show one run: what it was made with, from which code, where, and its last values."""

    async def work(client: AsyncClient) -> None:
        from trainyard.cli import run_views
        from trainyard.cli.output import write

        run = await client.run(of)
        if output.for_programs:
            write(run, output)
        else:
            run_views.detail(run, wide=output is Format.WIDE)

    with_client(work, reads=True)


def rm(
    of: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...",
            help="The id or the only name of a plain script's run; or a job, whose attempts' runs go together.",
            autocompletion=complete_jobs,
        ),
    ],
    yes: Yes = False,
    dry_run: DryRun = False,
    output: Output = Format.TABLE,
) -> None:
    """Remove runs to which nothing writes: logs, metrics, parameters, tags and notes."""

    async def work(client: AsyncClient) -> int:
        from trainyard.cli.removing import remove

        return await remove(
            of,
            client.run_removal,
            client.remove_run,
            command="yard runs rm",
            yes=yes,
            dry_run=dry_run,
            output=output,
        )

    with_client(work)


def compare(
    of: Annotated[list[str], typer.Argument(metavar="A B [C]...", help="Jobs or runs.", autocompletion=complete_jobs)],
    everything: Annotated[bool, typer.Option("--all", help="Also what is the same.")] = False,
    diff: Annotated[
        bool, typer.Option("--diff", help="Only how the uncommitted code of the second differs from the first's.")
    ] = False,
    output: Output = Format.TABLE,
) -> None:
    """Show what differs between runs: parameters, tags, notes, code, where they ran, last values."""

    async def work(client: AsyncClient) -> None:
        from trainyard.cli import run_views
        from trainyard.cli.output import write

        found = await client.compare(of, everything=everything)
        if diff:
            run_views.code_change(found)
        elif output.for_programs:
            write(found, output)
        else:
            run_views.comparison(found, wide=output is Format.WIDE)

    with_client(work, reads=True)
