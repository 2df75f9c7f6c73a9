"""`python -m trainyard.agent.shell NODE_FOLDER PID ID [COMMAND...]`: a command beside a worker, in the same container.

It gets the worker's folder and environment; the node's, while that worker does not run. Whoever started it from outside
may hang up without a word reaching the command: `--end ID` ends all that is left of it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from trainyard.proc import Process, processes, send_signal

END = "--end"
MARK = "TRAINYARD_SHELL"
NOT_FOUND = 127


def main(argv: list[str]) -> int:
    """Becomes the command; returns only when there is none such."""
    if len(argv) == 3 and argv[1] == END:
        return end(argv[2])
    folder, pid, identity, *command = argv[1:]
    environ, cwd = surroundings(Path(folder), int(pid))
    environ[MARK] = identity
    command = command or [login_shell(environ)]
    os.chdir(cwd)
    try:
        os.execvpe(command[0], command, environ)
    except OSError as error:
        sys.stderr.write(f"there is no command '{command[0]}' in the worker's PATH: {error.strerror}\n")
        return NOT_FOUND


def surroundings(folder: Path, pid: int) -> tuple[dict[str, str], Path]:
    """Environment and folder of a worker; of the node, when the worker is not there."""
    try:
        pairs = os.fsdecode(Path(f"/proc/{pid}/environ").read_bytes()).split("\0")
        return dict(pair.split("=", 1) for pair in pairs if "=" in pair), Path(f"/proc/{pid}/cwd").readlink()
    except OSError:
        work = folder / "work"
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TRAINYARD_")}
        return kept, work if work.is_dir() else Path("/")


def login_shell(environ: dict[str, str]) -> str:
    wanted = environ.get("SHELL", "")
    return wanted if wanted and shutil.which(wanted) else shutil.which("bash") or "/bin/sh"


def end(identity: str) -> int:
    """SIGHUP, then SIGKILL to everything of a shell that its user has left."""
    for number in (signal.SIGHUP, signal.SIGCONT, signal.SIGKILL):
        for process in marked(identity):
            send_signal(process.pid, process.start_time, number)
    return 0


def marked(identity: str) -> Iterator[Process]:
    """The processes that belong to a shell."""
    mark = f"{MARK}={identity}".encode()
    for process in processes():
        with contextlib.suppress(OSError):
            environ = Path(f"/proc/{process.pid}/environ").read_bytes()
            if process.pid != os.getpid() and mark in environ.split(b"\0"):
                yield process


if __name__ == "__main__":
    sys.exit(main(sys.argv))
