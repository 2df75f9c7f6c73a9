"""The command `yard` in a process of its own, as a user has it."""

from __future__ import annotations

import asyncio
import os
import pty
import sys
from dataclasses import dataclass

from scripts.testbed.patience import PATIENCE_S


@dataclass
class Ended:
    """How a command ended and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()


async def start(*arguments: str, **environment: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "trainyard.cli.main",
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **environment},
    )


async def finish(process: asyncio.subprocess.Process, stdin: str = "") -> Ended:
    out, err = await asyncio.wait_for(process.communicate(stdin.encode()), PATIENCE_S)
    assert process.returncode is not None
    return Ended(process.returncode, out.decode(), err.decode())


async def run(*arguments: str, stdin: str = "", **environment: str) -> Ended:
    return await finish(await start(*arguments, **environment), stdin)


async def run_on_terminal(*arguments: str, **environment: str) -> Ended:
    """Runs a command whose output goes to a terminal, without colours; what it writes comes as `out`."""
    ours, theirs = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "trainyard.cli.main", *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "NO_COLOR": "1", "COLUMNS": "200", **environment},
    )
    os.close(theirs)
    out = await asyncio.to_thread(_read_all, ours)
    return Ended(await process.wait(), out.replace("\r\n", "\n"), "")


def _read_all(terminal: int) -> str:
    read = b""
    try:
        while part := os.read(terminal, 65536):
            read += part
    except OSError:  # the other side is closed
        pass
    os.close(terminal)
    return read.decode()
