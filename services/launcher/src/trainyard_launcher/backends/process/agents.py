"""Starts agent processes and hears of their end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from pathlib import Path

from servicekit.descriptors import restore_limit
from trainyard.inherited import inherited
from trainyard.proc import open_process, process_of, send_signal

from trainyard_launcher.backends.process.folders import NodeFolder

AGENT = (sys.executable, "-m", "trainyard.agent")
SALVAGE = (sys.executable, "-m", "trainyard.agent.salvage")
SALVAGE_S = 40.0  # it limits itself to less


SECRETS_VARIABLE = "TRAINYARD_SECRETS"
"""Takes the job's secrets to the agent, so that they are in no file; the workers see their own names only."""
ATTEMPT_VARIABLE, NODE_VARIABLE = "TRAINYARD_ATTEMPT_ID", "TRAINYARD_NODE"
DELIVERY_TOKEN_VARIABLE = "TRAINYARD_DELIVERY_TOKEN"
"""Takes the token for the delivery of what an agent left to the process that delivers it."""


def environment(
    home: Path, attempt_id: str, node: int, declared: Sequence[str] = (), base: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """What an agent, and with it the workers, is started with: what is inherited, marked so that all of an attempt can
    be found.

    Variables of an attempt this process may itself run in are not handed on.

    Args:
        declared: which variables of this process are inherited beside those that all programs need.
    """
    own = inherited(base, declared)
    kept = {name: value for name, value in own.items() if not name.startswith(("TRAINYARD_", "TORCHELASTIC_"))}
    return kept | {
        "TRAINYARD_HOME": str(home),
        ATTEMPT_VARIABLE: attempt_id,
        NODE_VARIABLE: str(node),
        "MALLOC_ARENA_MAX": "2",  # an agent has many threads and little to do: arenas would be most of its memory
    }


def spawn(agent: Sequence[str], folder: NodeFolder, environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Starts a node's agent in a session of its own, so that no signal of our terminal reaches it.

    Raises:
        OSError: it cannot be started.
    """
    with folder.log.open("ab") as log:
        process = subprocess.Popen(
            [*agent, str(folder.path)],
            cwd=folder.path,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    restore_limit(process.pid)  # before its interpreter has begun, and long before it starts workers
    return process


class Salvaged(Enum):
    """What became of the records that an agent left."""

    STORED = auto()
    NOT_NOW = auto()
    REFUSED = auto()  # for good


async def salvage(folder: NodeFolder, environ: Mapping[str, str], token: str = "") -> Salvaged:
    """Delivers what an agent that has ended left on disk, as far as metrics takes it in time.

    Args:
        token: for the delivery, when the attempt is closed; "" for the attempt's own.
    """
    # Not marked as the attempt's: it belongs to the launcher, and the attempt may have been over for long.
    own = {name: value for name, value in environ.items() if name not in (ATTEMPT_VARIABLE, NODE_VARIABLE)}
    if token:
        own[DELIVERY_TOKEN_VARIABLE] = token
    with folder.log.open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *SALVAGE, str(folder.path), env=own, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    started = process_of(process.pid)
    try:
        code = await asyncio.wait_for(process.wait(), SALVAGE_S)
    except TimeoutError:
        return Salvaged.NOT_NOW
    finally:
        if process.returncode is None:  # also when this launcher ends
            if started is not None:
                send_signal(started.pid, started.start_time, signal.SIGKILL)
            await process.wait()
    return {0: Salvaged.STORED, 3: Salvaged.REFUSED}.get(code, Salvaged.NOT_NOW)


class Watch:
    """Calls back once when a process has ended. A child stays a zombie until `reap`."""

    def __init__(self, pidfd: int, on_end: Callable[[], None], child: subprocess.Popen[bytes] | None) -> None:
        self._pidfd = pidfd
        self._on_end = on_end
        self._child = child
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._pidfd, self._ended)

    @classmethod
    def child(cls, child: subprocess.Popen[bytes], on_end: Callable[[], None]) -> Watch:
        """Of a child that nobody has waited for: it has its pid as long as that is so."""
        return cls(os.pidfd_open(child.pid), on_end, child)

    @classmethod
    def other(cls, pid: int, start_time: int, on_end: Callable[[], None]) -> Watch:
        """Of a process that another instance of the launcher started.

        Raises:
            ProcessLookupError: it has ended.
        """
        pidfd = open_process(pid, start_time)
        if pidfd is None:
            raise ProcessLookupError(f"the process {pid} that was started at {start_time} has ended")
        return cls(pidfd, on_end, None)

    def _ended(self) -> None:
        self._stop_watching()
        self._on_end()

    def signal(self, number: int) -> None:
        """Sends a signal to this very process, never to one that got its pid later."""
        with contextlib.suppress(ProcessLookupError, OSError):
            signal.pidfd_send_signal(self._pidfd, number)

    def reap(self) -> None:
        """Takes the exit status of a child that has ended."""
        if self._child is not None:
            self._child.poll()

    def close(self) -> None:
        """Stops watching; the process goes on."""
        self._stop_watching()
        self.reap()

    def _stop_watching(self) -> None:
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
