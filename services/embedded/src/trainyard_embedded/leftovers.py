"""Runs that plain scripts recorded while no yard was up: delivered by a process of its own once one is."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from trainyard.proc import Process, process_of, send_signal

RUNS_FOLDER = "offline"


class Leftovers:
    """The runs under a yard's home that wait for delivery.

    Args:
        home: the yard's folder.
        ca_file: root certificate of the yard's endpoint; None for plaintext on loopback.
    """

    def __init__(self, home: Path, ca_file: Path | None) -> None:
        self._home = home
        self._ca_file = ca_file
        self._shipper: asyncio.subprocess.Process | None = None
        self._started: Process | None = None

    async def deliver(self) -> None:
        """Starts the delivery, when there is anything."""
        runs = self._home / RUNS_FOLDER
        if not runs.is_dir() or not any(runs.iterdir()):
            return
        environ = os.environ | ({"TRAINYARD_CA_FILE": str(self._ca_file)} if self._ca_file else {})
        command = (sys.executable, "-m", "trainyard.agent.ship", str(runs))
        self._shipper = await asyncio.create_subprocess_exec(*command, env=environ, stdin=asyncio.subprocess.DEVNULL)
        self._started = process_of(self._shipper.pid)

    async def stop(self) -> None:
        """Ends the delivery; what is left waits for the next yard."""
        if self._shipper is not None:
            if self._started is not None:
                send_signal(self._started.pid, self._started.start_time, signal.SIGTERM)
            await self._shipper.wait()
