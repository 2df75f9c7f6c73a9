"""The command logs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from trainyard.cli.arguments import LAST, Job, Output, with_client
from trainyard.cli.output import Format

if TYPE_CHECKING:
    from trainyard_protos.v1 import metrics_pb2
    from trainyard_protos.v1.scheduler_pb2 import Job as JobMessage

    from trainyard.client import AsyncClient
    from trainyard.client.follow import Position


def register(app: typer.Typer) -> None:
    app.command()(logs)


def logs(
    job: Job = LAST,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Go on until the job ends; exits as the job did.")
    ] = False,
    rank: Annotated[
        list[int] | None, typer.Option(help="Only this rank; -1 for what the agent says. Can be given again.")
    ] = None,
    tail: Annotated[int, typer.Option(min=0, help="Only the last lines so far; 0 for all.")] = 0,
    search: Annotated[str, typer.Option(help="Only lines that contain this.")] = "",
    attempt: Annotated[int, typer.Option(min=0, help="Only this attempt; 0 for all.")] = 0,
    times: Annotated[bool, typer.Option("--times", help="Write the time of each line.")] = False,
    output: Output = Format.TABLE,
) -> None:
    """Show what a job wrote, by rank. With -o json, one object a line."""
    if follow and attempt:
        raise typer.BadParameter("an attempt that is over cannot be followed", param_hint="--attempt")

    async def work(client: AsyncClient) -> int:
        from trainyard.client.follow import Position

        found = await client.get(job)
        show = _writer(found, times, output)
        position = Position(attempt=found.attempt)
        ranks = rank or list(range(found.nodes * found.workers_per_node))
        stored = client.logs(found.id, attempt=attempt, ranks=ranks, tail=tail, search=search)
        async for line in stored:
            show(line)
            if line.attempt == position.attempt:
                position.next_seq[line.line.node] = line.line.seq + 1
        return await _go_on(client, found, position, show, ranks, search) if follow else 0

    with_client(work)


Writer = Callable[["metrics_pb2.StoredLine"], None]


def _writer(job: JobMessage, times: bool, output: Format) -> Writer:
    from trainyard.cli.lines import LineFormat
    from trainyard.cli.output import write_line
    from trainyard.cli.terminal import say

    if output.for_programs:
        return write_line
    form = LineFormat(workers=job.nodes * job.workers_per_node, times=times)
    return lambda stored: say(form.text(stored.line))


async def _go_on(
    client: AsyncClient, job: JobMessage, position: Position, show: Writer, ranks: list[int], search: str
) -> int:
    """Follows to the end of the job; returns the exit code it stands for."""
    from trainyard_protos.v1 import metrics_pb2

    from trainyard.cli.run.summary import exit_code
    from trainyard.cli.terminal import complain

    async for event in client.follow(job.id, position):
        for line in event.lines.lines:
            if line.rank in ranks and search in line.text:
                show(metrics_pb2.StoredLine(attempt=position.attempt, line=line))
        if event.WhichOneof("event") == "dropped":
            complain(f"… {event.dropped.to_seq - event.dropped.from_seq} lines of node {event.dropped.node} are lost")
    return exit_code(await client.wait(job.id))
