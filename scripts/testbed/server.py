"""One server process on loopback: started on a free port, ready when it answers, gone when its owner is.

The kernel ends a server when the process that started it dies, however it dies (parent-death signal).
"""

from __future__ import annotations

import os
import pwd
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from scripts.testbed.patience import PATIENCE_S
from scripts.testbed.ports import free_port

STOP_TIMEOUT_S = 60.0  # then it is killed
_LOOK_S = 0.02
# To the kernel a process's parent is the thread that made it: this one lives as long as the process.
_spawner = ThreadPoolExecutor(1, thread_name_prefix="spawner")


def accepts(port: int) -> bool:
    """Whether somebody listens there."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


def unprivileged(user: str | None) -> list[str]:
    """What to put before a command that runs as somebody else; nothing for None."""
    if user is None:
        return []
    return ["setpriv", f"--reuid={user}", f"--regid={pwd.getpwnam(user).pw_gid}", "--clear-groups"]


def _dies_with_parent(command: list[str], user: str | None) -> list[str]:
    # By a program, not by a function between fork and exec: gRPC's threads do not survive a plain fork.
    return [*(unprivileged(user) or ["setpriv"]), "--pdeathsig=KILL", "--", *command]


class Server(ABC):
    """A server that can be stopped, killed and started again on the same port with the same data.

    Args:
        folder: for its data and its log.
        port: to listen on; 0 for a free one.
    """

    name: str
    graceful = signal.SIGTERM

    def __init__(self, folder: Path, port: int = 0) -> None:
        self.folder = folder
        self.port = port or free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def command(self) -> list[str]:
        """What is run."""

    def environ(self) -> Mapping[str, str]:
        """What it is run with, beside this process's environment."""
        return {}

    def user(self) -> str | None:
        """Whom it runs as; None for whoever runs this."""
        return None

    def prepare(self) -> None:  # noqa: B027 (most need nothing)
        """Makes what it needs before its first start."""

    def ready(self) -> bool:
        """Whether it serves."""
        return accepts(self.port)

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Starts it, when it does not run; returns when it serves.

        Raises:
            RuntimeError: it ended instead, or did not come up in time; its log is in the message.
        """
        self.launch()
        self.wait_ready()

    def launch(self) -> None:
        """Starts it, when it does not run, without waiting until it serves."""
        if self.alive:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        self.prepare()
        with self.log.open("ab") as log:
            self.process = _spawner.submit(
                subprocess.Popen,
                _dies_with_parent(self.command(), self.user()),
                env=os.environ | dict(self.environ()),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            ).result()

    def wait_ready(self, ready: Callable[[], bool] | None = None) -> None:
        """Returns when it serves, or when what is given instead is true.

        Raises:
            RuntimeError: as for `start`.
        """
        deadline = time.monotonic() + PATIENCE_S
        while not (ready or self.ready)():
            if not self.alive:
                raise RuntimeError(f"{self.name} ended with {self._code()}:\n{self.tail()}")
            if time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"{self.name} does not serve after {PATIENCE_S} s:\n{self.tail()}")
            time.sleep(_LOOK_S)

    def stop(self) -> None:
        """Ends it as an operator would; kills it when it does not end in time."""
        self._signal(self.graceful)
        if self.process is not None:
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.kill()

    def kill(self) -> None:
        """SIGKILL, and waits until it is gone, with the processes that end because it does."""
        family = self._family()
        self._signal(signal.SIGKILL)
        if self.process is not None:
            self.process.wait(STOP_TIMEOUT_S)
        psutil.wait_procs(family, STOP_TIMEOUT_S)

    def children(self) -> list[psutil.Process]:
        """All processes below it."""
        return psutil.Process(self.process.pid).children(recursive=True) if self.process and self.alive else []

    def _family(self) -> list[psutil.Process]:
        """The processes that end because it does: those of its session. What it started in another one goes on."""
        return [child for child in self.children() if self.process and _session(child.pid) == self.process.pid]

    def pause(self) -> None:
        """SIGSTOP: it is there, and does nothing."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Lets it go on after `pause`."""
        self._signal(signal.SIGCONT)

    def restart(self) -> None:
        """Stops and starts it, on the same port."""
        self.stop()
        self.start()

    def tail(self, characters: int = 3000) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-characters:] if self.log.exists() else ""

    def _signal(self, number: int) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def _code(self) -> int | None:
        return self.process.returncode if self.process else None
