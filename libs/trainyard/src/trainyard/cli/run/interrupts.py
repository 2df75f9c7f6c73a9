"""Ctrl-C: the first detaches, the second offers to cancel."""

from __future__ import annotations

import asyncio
import signal
import sys
from enum import Enum, auto
from typing import TYPE_CHECKING

from trainyard.cli import terminal, words

if TYPE_CHECKING:
    from trainyard_protos.v1 import scheduler_pb2 as pb

SECOND_PRESS_S = 3.0


class Wish(Enum):
    """What becomes of the job."""

    DETACH = auto()
    CANCEL = auto()


async def offer(job: pb.Job, received: asyncio.Queue[signal.Signals]) -> Wish:
    """Says how to come back; on a terminal, a second Ctrl-C within seconds asks whether to cancel."""
    identifier = words.short(job.id)
    terminal.say(f"detached: {job.name} ({identifier}) goes on")
    terminal.next_steps(f"yard logs -f {identifier}", f"yard status {identifier}", f"yard cancel {identifier}")
    if not (terminal.is_terminal() and sys.stdin.isatty()):
        return Wish.DETACH
    terminal.say(terminal.styled(f"Ctrl-C again to cancel it (within {SECOND_PRESS_S:g} s)", "dim"))
    try:
        await asyncio.wait_for(received.get(), SECOND_PRESS_S)
    except TimeoutError:
        return Wish.DETACH
    return await _ask(job, received)


async def _ask(job: pb.Job, received: asyncio.Queue[signal.Signals]) -> Wish:
    terminal.prompt(f"cancel {job.name}? [y/N]")
    loop, answered = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), answered.set)
    answer = asyncio.create_task(answered.wait())
    again = asyncio.create_task(received.get())
    try:
        await asyncio.wait({answer, again}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        loop.remove_reader(sys.stdin.fileno())
        answer.cancel()
        again.cancel()
    if not answered.is_set():
        terminal.say()
        return Wish.DETACH
    return Wish.CANCEL if sys.stdin.readline().strip().lower() in ("y", "yes") else Wish.DETACH
