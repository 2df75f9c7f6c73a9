"""Commands about the yard itself: up, down, version."""

from __future__ import annotations

import os
import select
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainyard import errors, home
from trainyard.cli.arguments import Output
from trainyard.cli.output import Format
from trainyard.endpoints import MAX_PORT
from trainyard.proc import open_process

if TYPE_CHECKING:
    from trainyard_protos.v1 import scheduler_pb2, yard_pb2

_GRACE_S = 60.0
_HIDDEN_S, _HIDDEN_STEP_S = 5.0, 0.1
_HOST = "127.0.0.1"


def register(app: typer.Typer) -> None:
    for command in (up, down, version):
        app.command()(command)


def _port(value: int) -> int:
    if not 0 <= value <= MAX_PORT:
        raise typer.BadParameter(f"{value} is not a port; allowed: 0 to {MAX_PORT}")
    return value


def up(
    foreground: Annotated[
        bool, typer.Option("--foreground", help="Stay in this terminal; Ctrl-C ends the yard.")
    ] = False,
    host: Annotated[str, typer.Option(help="Address to listen on; beyond loopback needs TLS.")] = _HOST,
    port: Annotated[int, typer.Option(callback=_port, help="Port; 0 for the last one used, or a free one.")] = 0,
    tls_cert: Annotated[Path | None, typer.Option(exists=True, help="Certificate chain, PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option(exists=True, help="Private key, PEM.")] = None,
    tls_ca: Annotated[Path | None, typer.Option(exists=True, help="Root certificate, PEM.")] = None,
    metrics_port: Annotated[
        int, typer.Option(callback=_port, help="Serve Prometheus metrics on this port; 0 for no.")
    ] = 0,
) -> None:
    """Start a yard on this machine and leave it running."""
    from trainyard.cli.terminal import next_steps, say
    from trainyard.client import yards

    folder = home.home()
    running = home.read_endpoint(folder)
    options = {
        "host": None if host == _HOST else host,
        "port": port,
        "tls-cert": tls_cert and tls_cert.absolute(),
        "tls-key": tls_key and tls_key.absolute(),
        "tls-ca": tls_ca and tls_ca.absolute(),
        "metrics-port": metrics_port,
    }
    arguments = [part for name, value in options.items() if value for part in (f"--{name}", str(value))]
    if running is not None:
        _refuse_ephemeral(running)
        _refuse_options(running, arguments)
        say(f"a yard is up at {running.endpoint} (process {running.pid}, {folder})")
        return
    if foreground:
        yards.prepare(folder)
        command = yards.command(folder, arguments)
        os.execv(command[0], command)
    endpoint = yards.start(folder, arguments).wait()
    say(f"a yard is up at {endpoint} ({folder})")
    next_steps("yard run FILE", "yard jobs", "yard down")


def _refuse_ephemeral(running: home.YardFile) -> None:
    if running.ephemeral:
        raise errors.Conflict(
            f"the yard at {running.endpoint} was started by 'yard run' and ends with its jobs",
            reason="EphemeralYard",
            hint="wait for them, or end them with 'yard down', then 'yard up'",
        )


def _refuse_options(running: home.YardFile, arguments: list[str]) -> None:
    if arguments:
        raise errors.Conflict(
            f"a yard is up already at {running.endpoint}, and {' '.join(arguments)} would change nothing",
            reason="YardIsUp",
            hint="end it with 'yard down --leave-jobs', then 'yard up' with the options",
        )


def down(
    yes: Annotated[
        bool, typer.Option("-y", "--yes", help="Cancel active jobs without asking; needed where there is no terminal.")
    ] = False,
    stop_jobs: Annotated[
        bool,
        typer.Option("--stop-jobs/--leave-jobs", help="Cancel what runs, or let it go on for the next yard to find."),
    ] = True,
) -> None:
    """End the yard of this machine."""
    import asyncio

    from trainyard.cli import words
    from trainyard.cli.terminal import say

    folder = home.home()
    running = _find(folder)
    gone = open_process(running.pid, running.start_time) if running is not None else None
    if running is None or gone is None:
        say(f"no yard is running in {folder}")
        return
    try:
        jobs = asyncio.run(_shut_down(stop_jobs, ask=not yes))
        _wait_for(gone, running, folder)
    finally:
        os.close(gone)
    fate = "cancelled" if stop_jobs else "left to the next yard"
    what = f"; {words.plural(jobs, 'job')} {fate}" if jobs else ""
    say(f"the yard is down{what}")


def _find(folder: Path) -> home.YardFile | None:
    """Returns the yard that runs for `folder`; None when there is none. Waits for one that is starting or ending.

    Raises:
        Defect: there is one, and `yard.json` does not say which process it is.
    """
    give_up = time.monotonic() + _HIDDEN_S
    while (running := home.read_endpoint(folder)) is None and home.is_locked(folder):
        if time.monotonic() > give_up:
            lock = folder / home.LOCK_FILE
            raise errors.Defect(
                f"a yard holds {lock}, but {folder / home.YARD_FILE} does not name it",
                reason="YardHidden",
                hint=f"a yard writes that file again, unless it hangs or the disk is full: free the disk, or find its "
                f"process with 'fuser {lock}' and end it with 'kill'",
            )
        time.sleep(_HIDDEN_STEP_S)  # it writes its file, or lets go of the lock: no single event stands for both
    return running


async def _shut_down(stop_jobs: bool, *, ask: bool) -> int:
    """Ends the yard of this machine, whichever commands talk to.

    Returns:
        How many jobs it cancelled or left.
    """
    from trainyard.client import AsyncClient

    async with AsyncClient.of_this_machine() as client:
        active = [job async for job in client.list(states_in=_ACTIVE, include_owned=True)]
        if stop_jobs and ask:
            _ask(active)
        answer = await client.shutdown(stop_jobs=stop_jobs, timeout_s=_GRACE_S)
        return answer.stopped_jobs if stop_jobs else len(active)


_ACTIVE = ("queued", "starting", "running", "stopping", "finalizing")


def _ask(jobs: list[scheduler_pb2.Job]) -> None:
    """Asks whether to cancel the jobs.

    Raises:
        Conflict: there is no terminal to ask on.
    """
    from trainyard.cli import words
    from trainyard.cli.confirmation import confirm
    from trainyard.client.names import job_reference

    if not jobs:
        return
    names = ", ".join(map(job_reference, jobs[:5]))
    more = f" and {len(jobs) - 5} more" if len(jobs) > 5 else ""
    what = f"{words.plural(len(jobs), 'job')}: {names}{more}"
    confirm(
        f"Cancel {what}?",
        f"cancel {what}",
        "'yard down --yes' cancels them; 'yard down --leave-jobs' leaves them to the next yard",
    )


def _wait_for(process: int, running: home.YardFile, folder: Path) -> None:
    poll = select.poll()
    poll.register(process, select.POLLIN)
    if not poll.poll(_GRACE_S * 1000):
        raise errors.Defect(
            f"the yard (process {running.pid}) does not end",
            reason="YardHangs",
            hint=f"see {folder / 'yard.log'}; end it with 'kill {running.pid}'",
        )


def version(output: Output = Format.TABLE) -> None:
    """Show the version of this command and of the yard it talks to."""
    import asyncio
    from importlib.metadata import version as installed

    from trainyard.cli import tables
    from trainyard.cli.output import write
    from trainyard.client.connection import NO_YARD

    mine = installed("trainyard")
    try:
        info = asyncio.run(_info())
    except errors.NotRunning as error:
        if error.reason != NO_YARD:
            raise
        info = None
    if output.for_programs:
        write({"client": mine, "yard": info}, output)
        return
    yard = f"{info.version}, {info.home} (process {info.pid})" if info else "not running; start it with 'yard up'"
    tables.pairs([("yard command", mine), ("yard", yard), ("metrics", info.metrics_url if info else "")])


async def _info() -> yard_pb2.InfoResponse:
    from trainyard.client import AsyncClient

    async with AsyncClient() as client:
        return await client.info()
