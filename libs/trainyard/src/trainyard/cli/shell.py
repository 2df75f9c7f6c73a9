"""This terminal, joined to a shell inside a job."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import termios
import tty
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager

from trainyard_protos.v1 import launcher_pb2 as pb

from trainyard import errors
from trainyard.client import AsyncClient

_READ_BYTES = 64 * 1024
_PENDING = 64
"""Chunks of input that may wait for the yard."""

Input = asyncio.Queue[pb.ShellInput | None]


async def interact(client: AsyncClient, job: str, rank: int, command: Sequence[str]) -> int:
    """Runs a shell, or a command, in a worker's folder and environment; returns its exit code.

    Raises:
        YardError: the shell could not be opened, or the yard was lost.
    """
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    size = shutil.get_terminal_size()
    wanted = pb.ShellInput.Open(
        workspace=client.workspace,
        job_id=job,
        rank=rank,
        command=command,
        rows=size.lines,
        columns=size.columns,
        tty=terminal,
    )
    inputs: Input = asyncio.Queue(_PENDING)
    inputs.put_nowait(pb.ShellInput(open=wanted))
    with _raw(terminal), _resizes(inputs, terminal), _typed(inputs):
        async for output in client.shell(_sent(inputs)):
            if output.WhichOneof("output") == "exit_code":
                return output.exit_code
            sys.stdout.buffer.write(output.data)
            sys.stdout.buffer.flush()
    raise errors.Defect("the shell ended without an exit code", reason="ShellLost")


async def _sent(inputs: Input) -> AsyncIterator[pb.ShellInput]:
    while (item := await inputs.get()) is not None:
        yield item


@contextmanager
def _raw(terminal: bool) -> Iterator[None]:
    """Keys go to the other side as they are, Ctrl-C too."""
    if not terminal:
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    tty.setraw(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


@contextmanager
def _resizes(inputs: Input, terminal: bool) -> Iterator[None]:
    if not terminal:
        yield
        return

    def resized() -> None:
        size = shutil.get_terminal_size()
        if not inputs.full():  # the next one tells the newest size anyway
            inputs.put_nowait(pb.ShellInput(resize=pb.ShellInput.Resize(rows=size.lines, columns=size.columns)))

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGWINCH, resized)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)


@contextmanager
def _typed(inputs: Input) -> Iterator[None]:
    """Standard input, read when there is some and there is room for it."""
    reader = asyncio.create_task(_read(inputs))
    try:
        yield
    finally:
        reader.cancel()


async def _read(inputs: Input) -> None:
    descriptor = sys.stdin.fileno()
    await _readable(descriptor)
    while data := os.read(descriptor, _READ_BYTES):
        await inputs.put(pb.ShellInput(stdin=data))
        await _readable(descriptor)
    await inputs.put(pb.ShellInput(close_stdin=True))


async def _readable(descriptor: int) -> None:
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    try:
        loop.add_reader(descriptor, ready.set)
    except PermissionError:  # a plain file, which is always readable
        return
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)
