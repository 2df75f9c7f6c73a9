"""The command logs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from trainyard.cli.arguments import LAST, OptionalOf, Output, with_client
from trainyard.cli.output import Format

if TYPE_CHECKING:
    from trainyard_protos.v1 import metrics_pb2
    from trainyard_protos.v1.common_pb2 import LogLine
    from trainyard_protos.v1.scheduler_pb2 import Job as JobMessage

    from trainyard.client import AsyncClient
    from trainyard.client.follow import Position


def register(app: typer.Typer) -> None:
    app.command()(logs)


def logs(
    of: OptionalOf = LAST,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Go on until the job ends; exits as the job did.")
    ] = False,
    rank: Annotated[
        list[int] | None, typer.Option(help="Only this rank; -1 for what the agent says. Can be given again.")
    ] = None,
    tail: Annotated[int, typer.Option(min=0, help="Only the last lines so far; 0 for all.")] = 0,
    search: Annotated[str, typer.Option(help="Only lines that contain this.")] = "",
    regex: Annotated[str, typer.Option(help="Only lines in which this pattern (RE2) is found.")] = "",
    attempt: Annotated[int, typer.Option(min=0, help="Only this attempt; 0 for all.")] = 0,
    times: Annotated[bool, typer.Option("--times", help="Write the time of each line.")] = False,
    output: Output = Format.TABLE,
) -> None:
    """Show what a job wrote, by rank. With -o json, one object a line."""
    if follow and attempt:
        raise typer.BadParameter("an attempt that is over cannot be followed", param_hint="--attempt")
    matches = _matcher(search, regex)

    async def work(client: AsyncClient) -> int:
        from trainyard.cli.terminal import complain
        from trainyard.client.follow import Position
        from trainyard.client.runs import Subject

        found, only = await _job(client, of, attempt)
        _check_exist(found, attempt, rank or [])
        show = _writer(found, times, output)
        position = Position(attempt=found.attempt)
        ranks = rank or list(range(found.nodes * found.workers_per_node))
        stored = client.logs(Subject(job_id=found.id), attempt=only, ranks=ranks, tail=tail, search=search, regex=regex)
        none = True
        async for line in stored:
            none = False
            show(line)
            if line.attempt == position.attempt:
                position.next_seq[line.line.node] = line.line.seq + 1
        if follow and client.read_only:
            return _of_an_ended_job(found)
        if not follow:
            if none and not output.for_programs:
                complain("no such lines" if rank or only or search or regex else "it has written nothing")
            return 0
        return await _go_on(client, found, position, show, lambda line: line.rank in ranks and matches(line.text))

    with_client(work, reads=True)


async def _job(client: AsyncClient, of: str, attempt: int) -> tuple[JobMessage, int]:
    """The job that is meant, and which of its attempts: a run of a job is one attempt.

    Raises:
        Conflict: the run is one of a plain script.
    """
    from trainyard.errors import Conflict, NotFound

    try:
        return await client.get(of), attempt
    except NotFound:
        run = await client.run(of)
    if not run.job_id:
        raise Conflict(
            f"{run.name or run.id} is the run of a plain script, which writes its output to its own terminal",
            reason="NoOutput",
            hint=f"yard metrics {run.id} shows what it tracked; as a job, its output is kept as well",
        )
    return await client.get(run.job_id), run.attempt


def _check_exist(job: JobMessage, attempt: int, ranks: list[int]) -> None:
    """Refuses an attempt or a rank that the job does not have.

    Raises:
        NotFound: names the first one, and those that exist.
    """
    from trainyard.client.names import job_reference
    from trainyard.errors import NotFound

    if attempt > job.attempt:
        exist = f"its attempts are {_range(1, job.attempt)}" if job.attempt else "it has not started"
        raise NotFound(f"{job_reference(job)} has no attempt {attempt}", reason="AttemptNotFound", hint=exist)
    workers = job.nodes * job.workers_per_node
    missing = [rank for rank in ranks if not -1 <= rank < workers]
    if missing:
        raise NotFound(
            f"{job_reference(job)} has no rank {missing[0]}",
            reason="RankNotFound",
            hint=f"its ranks are {_range(0, workers - 1)}; -1 selects the lines of its agents",
        )


def _range(first: int, last: int) -> str:
    return f"{first} to {last}" if last > first else f"{first} alone"


def _matcher(search: str, regex: str) -> Callable[[str], bool]:
    """Whether a live line is wanted, as the service decides it for stored ones."""
    if not regex:
        return lambda text: search in text
    import re2

    options = re2.Options()
    options.log_errors = False
    try:
        pattern = re2.compile(regex, options)
    except re2.error as error:
        detail = error.args[0].decode() if isinstance(error.args[0], bytes) else str(error)
        raise typer.BadParameter(f"not a pattern of RE2: {detail}", param_hint="--regex") from None
    return lambda text: search in text and pattern.search(text) is not None


Writer = Callable[["metrics_pb2.StoredLine"], None]


def _writer(job: JobMessage, times: bool, output: Format) -> Writer:
    from trainyard.cli.lines import LineFormat
    from trainyard.cli.output import write_line
    from trainyard.cli.terminal import say

    if output.for_programs:
        return write_line
    form = LineFormat(workers=job.nodes * job.workers_per_node, times=times)
    return lambda stored: say(form.text(stored.line))


def _of_an_ended_job(job: JobMessage) -> int:
    """The exit code of a job that is followed while no yard is up.

    Raises:
        NotRunning: it has not ended, and does not while no yard is up.
    """
    from trainyard.cli.run.summary import exit_code
    from trainyard.client import states
    from trainyard.client.connection import HOW_TO_START, NO_YARD
    from trainyard.client.names import job_reference
    from trainyard.errors import NotRunning

    if job.state not in states.ENDED:
        raise NotRunning(
            f"{job_reference(job)} is {states.name(job.state)}, and no yard is running to follow it",
            reason=NO_YARD,
            hint=HOW_TO_START,
        )
    return exit_code(job)


async def _go_on(
    client: AsyncClient, job: JobMessage, position: Position, show: Writer, wanted: Callable[[LogLine], bool]
) -> int:
    """Follows to the end of the job; returns the exit code it stands for.

    Raises:
        NeverFits: it is queued, and no machine can hold it.
    """
    from trainyard.cli.run.summary import exit_code

    ended = asyncio.create_task(client.until_ended(job))
    shown = asyncio.create_task(_show_new(client, job, position, show, wanted))
    try:
        await asyncio.wait({ended, shown}, return_when=asyncio.FIRST_EXCEPTION)
        for task in (ended, shown):
            if task.done():
                task.result()
        return exit_code(await ended)
    finally:
        for task in (ended, shown):
            task.cancel()
        await asyncio.gather(ended, shown, return_exceptions=True)


async def _show_new(
    client: AsyncClient, job: JobMessage, position: Position, show: Writer, wanted: Callable[[LogLine], bool]
) -> None:
    from trainyard_protos.v1 import metrics_pb2

    from trainyard.cli.terminal import complain

    async for event in client.follow(job.id, position):
        for line in event.lines.lines:
            if wanted(line):
                show(metrics_pb2.StoredLine(attempt=position.attempt, line=line))
        if event.WhichOneof("event") == "dropped":
            complain(f"… {event.dropped.to_seq - event.dropped.from_seq} lines of node {event.dropped.node} are lost")
