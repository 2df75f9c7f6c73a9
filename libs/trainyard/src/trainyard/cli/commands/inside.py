"""Commands that look inside a running job: shell, stacks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from trainyard.cli.arguments import LAST, Job, Output, RequiredJob, with_client
from trainyard.cli.output import Format

if TYPE_CHECKING:
    from trainyard.client import AsyncClient


def register(app: typer.Typer) -> None:
    app.command()(stacks)
    app.command(context_settings={"ignore_unknown_options": True})(shell)


def stacks(job: Job = LAST, output: Output = Format.TABLE) -> None:
    """Show the Python stack of every rank, now."""

    async def work(client: AsyncClient) -> None:
        from trainyard.cli.output import write
        from trainyard.cli.terminal import say, styled

        ranks = await client.stacks(job)
        if output.for_programs:
            write(ranks, output)
            return
        for rank in ranks:
            say(styled(f"rank {rank.rank} (process {rank.pid})", "bold"))
            say(rank.text.rstrip() if rank.text else f"  no stack: {rank.error}")

    with_client(work)


def shell(
    job: RequiredJob,
    command: Annotated[list[str] | None, typer.Argument(help="Command; default: your shell.")] = None,
    rank: Annotated[int, typer.Option(min=0, help="The worker whose folder and environment it gets.")] = 0,
) -> None:
    """Open a shell in the folder and environment of a worker. Exits as the command did."""

    async def work(client: AsyncClient) -> int:
        from trainyard.cli.shell import interact

        return await interact(client, await client.job_id(job), rank, command or [])

    with_client(work)
