"""The reaper of a run of tests: a process that waits for the run's end, by whatever it came, and then cleans up.

It also finishes the runs whose reapers were killed.
"""

from __future__ import annotations

import os
import select
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from scripts.testbed.runs import groups, journal, processes
from scripts.testbed.runs.run import JOURNAL

_COMMAND_S = 600
_SPARED = "TRAINYARD_TESTBED_PART"  # of a cluster, which may have other users


def main(path: Path, run: int) -> int:
    """Waits and cleans up.

    Args:
        path: of the journal.
        run: pidfd of the process that leads the run.

    Returns:
        0 when everything is gone.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, lambda *_: None)  # unlike SIG_IGN, the commands do not inherit it
    with journal.locked(path) as alone:
        if not alone:
            return 0  # the run has died, and another reaper has cleaned up
        print("ready", flush=True)
        for other in journal.abandoned(path.parent):
            clean_up(other, again=True)
        _wait(run)
        return 0 if clean_up(path) else 1


def _wait(run: int) -> None:
    readable = select.select([run, sys.stdin], [], [])[0]
    if run not in readable and not os.read(sys.stdin.fileno(), 1):
        # It has closed its files and dies: the locks that it held are free when it has ended.
        select.select([run], [], [])


def clean_up(path: Path, *, again: bool = False) -> bool:
    """Ends the processes of a run, runs its commands and removes its journal; returns whether all of that succeeded.

    Args:
        path: of the journal.
        again: whether it was tried before. What fails is printed, and tried again once, when another run begins.
    """
    found = journal.read(path)
    done = all([_end_processes(path, found.groups), *map(_run, reversed(found.commands))])
    if done or again:
        path.unlink()
        path.with_suffix(".log").unlink(missing_ok=True)
    return done


def _end_processes(path: Path, places: Iterable[Path]) -> bool:
    try:
        for group in places:
            groups.kill(group)
            groups.remove(group)
        processes.kill(f"{JOURNAL}={path}", _SPARED)
    except (OSError, TimeoutError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return False
    return True


def _run(command: list[str]) -> bool:
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_COMMAND_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return False
    if done.returncode:
        print(
            f"error: {shlex.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}",
            file=sys.stderr,
            flush=True,
        )
    return done.returncode == 0


if __name__ == "__main__":
    os.set_inheritable(int(sys.argv[2]), False)
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
