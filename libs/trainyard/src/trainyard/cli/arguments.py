"""Arguments and options that several commands have, and what running any of them needs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated

import typer

from trainyard.cli.boundary import reader_left
from trainyard.cli.output import Format

if TYPE_CHECKING:
    from trainyard.client import AsyncClient

LAST = "@last"
REFERENCE = "Id, unique prefix of one, name (its newest job), name#7, @last or @-2."
_COMPLETION_DEADLINE_S = 2.0


def complete_jobs(incomplete: str) -> list[tuple[str, str]]:
    """Ids and names of the newest jobs that begin with what is typed; a name stands for its newest job."""
    import asyncio

    from trainyard.client import AsyncClient, states
    from trainyard.client.names import job_reference
    from trainyard.errors import YardError

    async def candidates() -> list[tuple[str, str]]:
        async with asyncio.timeout(_COMPLETION_DEADLINE_S), AsyncClient() as client:
            jobs = [job async for job in client.list(limit=100)]
        rows = [(LAST, "the newest job")]
        for job in jobs:
            what = f"{job.name}, {states.name(job.state)}"
            rows += [(job_reference(job), what), (job.id, what)] if job.number else [(job.id, what)]
        names = {job.name: states.name(job.state) for job in reversed(jobs)}
        return rows + list(names.items())

    try:
        return [row for row in asyncio.run(candidates()) if row[0].startswith(incomplete)]
    except (YardError, TimeoutError):
        return []


Job = Annotated[
    str,
    typer.Argument(metavar="[JOB]", help=REFERENCE, autocompletion=complete_jobs),
]
RequiredJob = Annotated[
    str,
    typer.Argument(metavar="JOB", help=REFERENCE, autocompletion=complete_jobs),
]
Of = Annotated[
    str, typer.Argument(metavar="RUN", help="A job, or the id or name of a run.", autocompletion=complete_jobs)
]
OptionalOf = Annotated[
    str,
    typer.Argument(metavar="[JOB]", help="A job, or the id or name of a run.", autocompletion=complete_jobs),
]
Output = Annotated[Format, typer.Option("-o", "--output", help="How to write the answer.", show_default=False)]
Yes = Annotated[bool, typer.Option("-y", "--yes", help="Remove without asking; needed where there is no terminal.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show what would be freed and what would stay.")]
File = Annotated[str, typer.Argument(metavar="FILE", help="Job file, YAML or JSON; - reads standard input.")]


def with_client(work: Callable[[AsyncClient], Awaitable[int | None]], *, reads: bool = False) -> None:
    """Runs a command's work with a client of the yard; ends with the exit code it returns.

    Args:
        reads: the work changes nothing and waits for nothing, so that a yard which only reads will do.
    """
    from trainyard.client import reading

    starting = reading.start_if_needed() if reads else None  # it starts while this process still imports
    import asyncio

    from trainyard.client import AsyncClient

    async def run() -> int | None:
        async with reading.reading_client(starting) if reads else AsyncClient() as client:
            return await work(client)

    try:
        code = asyncio.run(run())
    except BrokenPipeError:  # typer would make a failure of it
        code = reader_left()
    raise typer.Exit(code or 0)


def source(file: str) -> str:
    """The document named on the command line: a path, or the text on standard input.

    Raises:
        InvalidArgument: standard input is empty.
    """
    if file != "-":
        return file
    import sys

    from trainyard.errors import InvalidArgument

    text = sys.stdin.read()
    if not text.strip():
        raise InvalidArgument("standard input is empty", hint="pipe a job file into this command")
    return f"{text}\n"
