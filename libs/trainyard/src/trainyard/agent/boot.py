"""The first stage: from nothing to running workers, with as few imports as possible.

SIGTERM is held back until the second stage can forward it: it must neither kill the agent alone nor be lost.
"""

# pathlib takes longer to import than a worker may wait.
# ruff: noqa: PTH100, PTH103

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]  # `signal` itself loads enum and more
import io
import json
import os
import sys

from trainyard.agent import native
from trainyard.agent.contract import workers_of
from trainyard.agent.plan import Plan, read_plan
from trainyard.agent.spawn import CannotStart, Started, start_all

STARTED_FILE = "started"
LOG_FILE = "agent.log"
EXIT_DRAFT = "exit.bin.new"
EXIT_BYTES = 64 * 1024
"""Room that is taken for the record of a node's end."""
SECRETS_VARIABLE = "TRAINYARD_SECRETS"
"""The job's secrets, as JSON: they are in no file, so not in the plan."""
HELD_BACK = (signal.SIGTERM, signal.SIGINT)
JOIN = "--join"


def main(argv: list[str]) -> int:
    """Runs one node of an attempt to its end; the result is the process's exit code.

    0 also when another agent already has the folder: being started twice is harmless.
    """
    if len(argv) != 2:
        sys.stderr.write("usage: python -m trainyard.agent NODE_FOLDER | --join\n")
        return 2
    signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
    if argv[1] == JOIN:
        return in_pod()
    folder = os.path.abspath(argv[1])
    plan = read_plan(folder)
    plan.env.update(json.loads(os.environ.pop(SECRETS_VARIABLE, "{}")))
    if not claim(folder):
        return 0
    join_cgroups(plan.cgroup_procs)
    log_to(f"{folder}/{LOG_FILE}")
    return run(folder, plan)


def in_pod() -> int:
    """One node of an attempt in a container: its log is the container's, its plan comes from the launcher."""
    use_grpc()
    from trainyard.agent.join import NotWanted, join

    try:
        folder, plan = join(os.environ)
    except NotWanted as error:
        sys.stderr.write(f"{error}\n")
        return 1
    claim(folder)
    return run(folder, plan)


def run(folder: str, plan: Plan) -> int:
    """Starts what needs no preparation, then goes on to the second stage."""
    native.adopt_orphans()
    make_folders(folder, plan)
    started: list[Started] = []
    failure: CannotStart | None = None
    if not plan.needs_preparation:
        try:
            start_all(workers_of(plan, folder), started)
        except CannotStart as error:
            failure = error
    return second_stage(folder, plan, started, failure)


def second_stage(folder: str, plan: Plan, started: list[Started], failure: CannotStart | None) -> int:
    use_grpc()
    from trainyard.agent.supervisor import supervise

    return supervise(folder, plan, started, failure)


def use_grpc() -> None:
    """To be called before gRPC is loaded."""
    # Every child of this process goes on to exec at once. gRPC's handlers would run in it first, and they crash when
    # other threads are inside of gRPC.
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
    # asyncio loads ssl when it can, which is a tenth of the agent's memory. gRPC, the only one here to use TLS, has
    # its own.
    sys.modules["ssl"] = None  # type: ignore[assignment]


def claim(folder: str) -> bool:
    """Takes the folder for this process, durably; False when it is taken."""
    try:
        fd = os.open(f"{folder}/{STARTED_FILE}", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return False
    pid = os.getpid()
    record = {"pid": pid, "start_time": native.start_time(pid), "boot_id": native.boot_id()}
    os.write(fd, json.dumps(record).encode())
    os.close(fd)
    _reserve(f"{folder}/{EXIT_DRAFT}")
    return True


def _reserve(path: str) -> None:
    """Takes the room of the exit record while there is some: workers may fill the disk."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, EXIT_BYTES)
    except OSError:
        pass  # no room now; the agent then says over its session how the node ended
    finally:
        os.close(fd)


def join_cgroups(files: list[str]) -> None:
    """Joins the groups that limit this node, before there is any child to escape them."""
    for path in files:
        with open(path, "w") as file:
            file.write(str(os.getpid()))


def make_folders(folder: str, plan: Plan) -> None:
    for name in ("work", "out", "tracker", "spool"):
        os.makedirs(f"{folder}/{name}", exist_ok=True)
    if plan.checkpoints and not plan.needs_preparation:
        os.makedirs(f"{folder}/work/{plan.checkpoints.path}", exist_ok=True)


def log_to(path: str) -> None:
    """Everything this process prints goes to its log from here on."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    sys.stdout = sys.stderr = _Log()


class _Log(io.TextIOBase):
    """The log as a stream: a disk that is full costs lines of the log, and never the agent."""

    def write(self, text: str) -> int:
        try:
            os.write(2, text.encode(errors="backslashreplace"))
        except OSError:
            return 0
        return len(text)
