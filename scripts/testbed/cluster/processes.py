"""The processes of a cluster, found by a mark in their environment.

There is no file of process ids that could be lost or outdated: what runs is what the kernel says.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from scripts.testbed.runs import run

PATIENCE_S = 240.0
_LOOK_S = 0.1
_MARK = "TRAINYARD_TESTBED_PART"
_known: dict[str, psutil.Process] = {}  # what was found before, as a look at every process takes its time


class Failed(RuntimeError):
    """A part of the cluster did not do what it should; the message says which, and what it printed."""


def wait_for(condition: Callable[[], bool], what: str, *, patience_s: float = PATIENCE_S) -> None:
    """Returns when the condition holds.

    Raises:
        Failed: it does not hold in time.
    """
    deadline = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > deadline:
            raise Failed(f"no {what} after {patience_s:.0f} s")
        time.sleep(_LOOK_S)


def launch(mark: str, command: list[str], log: Path, environ: Mapping[str, str] | None = None) -> None:
    """Starts a process that belongs to nobody and outlives this one.

    Args:
        mark: by which `find` finds it.
        command: its leader, in a process group of its own.
        log: where its output is appended.
        environ: beside PATH, the only variable that it gets.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    settings = {"PATH": os.environ["PATH"], "HOME": "/root", _MARK: mark, **(environ or {})}
    command = run.outside(command)
    program = shutil.which(command[0]) or command[0]
    with log.open("ab") as output, Path(os.devnull).open("rb") as nothing:
        files = [(os.POSIX_SPAWN_DUP2, file.fileno(), number) for number, file in enumerate((nothing, output, output))]
        # Unlike Popen it keeps no hold on the process.
        pid = os.posix_spawn(program, command, settings, file_actions=files, setsid=True)
    # It returns a moment before the kernel shows the environment, and so the mark, of the new program.
    _known[mark] = psutil.Process(pid)


def find(mark: str) -> psutil.Process | None:
    """The leader of the process group that was launched under the mark; None when there is none."""
    known = _known.get(mark)
    if known is not None and _runs(known):
        return known
    found = next((process for process in marked(mark) if _mark(process) == mark and _leads(process)), None)
    if found is not None:
        _known[mark] = found
    return found


def kill(mark: str) -> None:
    """Ends what was launched under the mark, at once, and returns when it is gone."""
    leader = find(mark)
    if leader is not None:
        _end([leader, *_children(leader)])


def kill_all(prefix: str) -> None:
    """Ends every process whose mark begins with the prefix, and returns when they are gone."""
    _end(marked(prefix))


def marked(prefix: str) -> list[psutil.Process]:
    """Every process whose mark begins with the prefix: what was launched, and what that started outside of pods."""
    return [process for process in psutil.process_iter() if _mark(process).startswith(prefix)]


def leaders(prefix: str) -> dict[str, int]:
    """The process ids of what was launched under marks with the prefix and still runs, by mark."""
    return {_mark(process): process.pid for process in marked(prefix) if _leads(process)}


def tail(log: Path, characters: int = 3000) -> str:
    """The end of a log."""
    return log.read_text(errors="replace")[-characters:] if log.exists() else "(it printed nothing)"


def _end(processes: list[psutil.Process]) -> None:
    for process in processes:
        try:
            process.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    wait_for(lambda: not any(_runs(process) for process in processes), "end of processes that were killed")
    for process in processes:
        with suppress(ChildProcessError):
            os.waitpid(process.pid, os.WNOHANG)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children()
    except psutil.NoSuchProcess:
        return []


def _leads(process: psutil.Process) -> bool:
    # Whatever a part starts inherits its mark, in this session or in one of its own, but is another program. A part
    # is a shell until it has left the run of tests that starts it.
    try:
        return os.getsid(process.pid) == process.pid and process.name() in ("nsenter", "unshare", "sh")
    except (psutil.NoSuchProcess, ProcessLookupError):
        return False


def _mark(process: psutil.Process) -> str:
    try:
        return process.environ().get(_MARK, "")
    except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
        return ""
