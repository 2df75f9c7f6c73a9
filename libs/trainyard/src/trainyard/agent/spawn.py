"""Starting a worker: fork, a few system calls, exec.

Not `subprocess`: its import and its `preexec_fn` cost more than the whole start may take, and a worker must ask the
kernel to be killed with the agent before it runs a single instruction of the user's.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]  # `signal` itself loads enum and more
import os
import shutil

from trainyard.agent import native

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_ERROR_BYTES = 512


class Command:
    """A process to start, its output going to `log`."""

    def __init__(self, argv: list[str], env: dict[str, str], cwd: str, log: str) -> None:
        self.argv = argv
        self.env = env
        self.cwd = cwd
        self.log = log


class Worker(Command):
    """A worker to start: its place in the attempt and its command."""

    def __init__(self, rank: int, local_rank: int, command: Command) -> None:
        super().__init__(command.argv, command.env, command.cwd, command.log)
        self.rank = rank
        self.local_rank = local_rank


class Started:
    """A worker that was started."""

    def __init__(self, worker: Worker, pid: int) -> None:
        self.worker = worker
        self.pid = pid


class CannotStart(Exception):
    """A process could not be started; the message says what to do."""


def start_all(workers: Iterable[Worker], started: list[Started]) -> None:
    """Starts workers in order, each added to `started` as soon as it runs.

    Raises:
        CannotStart: one did not start. Those before it run.
    """
    for worker in workers:
        started.append(Started(worker, start(worker)))


def start(command: Command) -> int:
    """Starts a process in a process group of its own; it dies with this process. Returns its pid.

    Raises:
        CannotStart: the program is not there, is no program, or the folder is missing.
    """
    reading, writing = os.pipe()  # closed by exec, so that nothing to read means success
    agent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _become(command, agent, writing)
    os.close(writing)
    try:
        error = os.read(reading, _ERROR_BYTES)
    finally:
        os.close(reading)
    if error:
        os.waitpid(pid, 0)
        raise CannotStart(_explain(command, error.decode(errors="replace")))
    return pid


def _become(command: Command, agent: int, report: int) -> None:
    """In the child. Never returns."""
    try:
        os.setpgid(0, 0)
        native.die_with(agent)
        output = os.open(command.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(command.cwd)
        # Python ignores these two; a program expects the kernel's defaults.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.execvpe(command.argv[0], command.argv, command.env)
    except BaseException as error:
        os.write(report, str(error).encode()[:_ERROR_BYTES])
    finally:
        os._exit(127)


def _explain(command: Command, error: str) -> str:
    program = command.argv[0]
    if "/" in program:
        return f"'{program}' cannot be run in {command.cwd}: {error}; check spec.command and the code"
    path = command.env.get("PATH", os.defpath)
    if shutil.which(program, path=path):
        return f"'{program}' cannot be run: {error}"
    folders = os.pathsep.join(dict.fromkeys(path.split(os.pathsep)))
    where = f"no program of this name is in PATH, {folders}"
    return f"'{program}' cannot be run: {where}; check spec.command and what is installed"
