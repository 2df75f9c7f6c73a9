"""A shell beside a worker: its folder, its environment, a terminal of its own."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pty
import shutil
import struct
import sys
import termios
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from servicekit.ids import new_id
from trainyard.proc import process_of

from trainyard_launcher.backend import ShellRequest, StartError
from trainyard_launcher.backends.process import sweep

_READ_BYTES = 64 * 1024
MARK = "TRAINYARD_SHELL"
"""The variable that names a shell, for everything it starts: its session alone would not name it for good."""
_TTY_HELPER = Path(__file__).with_name("tty.py")


class ProcessShell:
    """A command in a session of its own, whose end takes everything of the session along."""

    def __init__(
        self, process: asyncio.subprocess.Process, mark: str, reader: asyncio.StreamReader, terminal: int | None
    ) -> None:
        self._process = process
        self._mark = mark
        started = process_of(process.pid)
        self._leader = sweep.Leader(started.pid, started.start_time) if started is not None else None
        self._reader = reader
        self._terminal = terminal  # our side of the pseudo-terminal, for input and size

    @classmethod
    async def open(cls, request: ShellRequest, cwd: Path, environ: Mapping[str, str]) -> ProcessShell:
        """Starts the command.

        Raises:
            StartError: there is no such command, or the worker's folder is gone.
        """
        mark = new_id()
        environ = {**environ, MARK: mark}
        command = list(request.command) or [_login_shell(environ)]
        if shutil.which(command[0], path=environ.get("PATH")) is None:
            raise StartError(f"there is no command '{command[0]}' in the worker's PATH")
        try:
            if request.tty:
                return await cls._open_tty(request, mark, command, cwd, environ)
            process = await asyncio.create_subprocess_exec(
                *command,
                cwd=cwd,
                env=environ,
                start_new_session=True,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
        except OSError as error:
            raise StartError(f"cannot run '{command[0]}' in {cwd}: {error.strerror}") from error
        assert process.stdout is not None
        return cls(process, mark, process.stdout, None)

    @classmethod
    async def _open_tty(
        cls, request: ShellRequest, mark: str, command: list[str], cwd: Path, environ: Mapping[str, str]
    ) -> ProcessShell:
        ours, theirs = pty.openpty()
        try:
            _set_size(theirs, request.rows, request.columns)
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", str(_TTY_HELPER), *command,
                cwd=cwd, env={"TERM": "xterm-256color", **environ}, start_new_session=True,
                stdin=theirs, stdout=theirs, stderr=theirs,
            )  # fmt: skip
        except OSError:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        file = os.fdopen(os.dup(ours), "rb", buffering=0)
        await loop.connect_read_pipe(lambda: _TerminalProtocol(reader), file)
        return cls(process, mark, reader, ours)

    async def output(self) -> AsyncIterator[bytes]:
        """What the command writes, until it has ended."""
        while data := await self._reader.read(_READ_BYTES):
            yield data

    async def write(self, data: bytes) -> None:
        """Hands input to the command; input for one that has ended is dropped."""
        with contextlib.suppress(OSError):
            if self._terminal is not None:
                await asyncio.to_thread(_write_all, self._terminal, data)
            elif self._process.stdin is not None:
                self._process.stdin.write(data)
                await self._process.stdin.drain()

    async def close_stdin(self) -> None:
        """No more input."""
        if self._terminal is not None:
            await self.write(b"\x04")
        elif self._process.stdin is not None:
            self._process.stdin.close()

    def resize(self, rows: int, columns: int) -> None:
        """The user's window has another size."""
        if self._terminal is not None:
            _set_size(self._terminal, rows, columns)

    async def wait(self) -> int:
        """The exit code; 128 plus the number of the signal that ended it."""
        code = await self._process.wait()
        return code if code >= 0 else 128 - code

    async def close(self) -> None:
        """Ends the command and everything of its session."""
        await asyncio.to_thread(self._end_all)
        await self._process.wait()
        if self._terminal is not None:
            os.close(self._terminal)
            self._terminal = None

    def _end_all(self) -> None:
        sweep.hang_up(self._members())
        sweep.end(self._members, 10, "a shell")

    def _members(self) -> sweep.Members:
        return sweep.find_shell(self._mark, self._leader)


class _TerminalProtocol(asyncio.StreamReaderProtocol):
    """The far end of a terminal that closes is an error, which would hide what was read before it: make it an end."""

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(None)


def surroundings_of(pid: int) -> tuple[Path, dict[str, str]]:
    """The folder a process is in, and the environment it was started with.

    Raises:
        OSError: it is gone.
    """
    pairs = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="surrogateescape").split("\0")
    return Path(f"/proc/{pid}/cwd").readlink(), dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def _login_shell(environ: Mapping[str, str]) -> str:
    wanted = environ.get("SHELL", "")
    return wanted if wanted and shutil.which(wanted) else shutil.which("bash") or "/bin/sh"


def _set_size(terminal: int, rows: int, columns: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows & 0xFFFF, columns & 0xFFFF, 0, 0))


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
