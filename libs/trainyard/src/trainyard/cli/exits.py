"""What the end of a process means."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainyard_protos.v1.common_pb2 import Exit

_CODES = {
    1: "the program raised an error",
    2: "the program was called with wrong arguments",
    126: "the command was found but cannot be executed",
    127: "the command was not found",
}
_SIGNALS = {
    "SIGKILL": "killed from outside, often because memory ran out",
    "SIGTERM": "asked to end",
    "SIGINT": "interrupted",
    "SIGSEGV": "crashed in native code",
    "SIGABRT": "aborted by native code",
    "SIGBUS": "crashed in native code, or /dev/shm is full",
    "SIGILL": "ran an instruction this CPU lacks",
    "SIGFPE": "divided by zero in native code",
    "SIGXCPU": "used up its CPU time",
}
_SHELL_OFFSET = 128
"""A shell reports a child that a signal ended as 128 plus its number."""


def meaning(code: int | None, signal_name: str) -> str:
    """For instance "exit code 1: the program raised an error"; "" when nothing is known."""
    if signal_name:
        return f"{signal_name}: {_SIGNALS.get(signal_name, 'ended by a signal')}"
    if code is None:
        return ""
    return f"exit code {code}{_of_code(code)}"


def _of_code(code: int) -> str:
    if code in _CODES:
        return f": {_CODES[code]}"
    try:
        name = signal.Signals(code - _SHELL_OFFSET).name
    except ValueError:
        return ""
    return f": {name}, {_SIGNALS.get(name, 'ended by a signal')}"


def describe(ended: Exit) -> str:
    """One line about how an attempt ended."""
    if ended.reason == "Completed":
        return "Completed"
    code = ended.exit_code if ended.HasField("exit_code") else None
    where = f"rank {ended.first_failing_rank}: " if ended.HasField("first_failing_rank") else ""
    what = meaning(code, ended.signal) or ended.message
    return f"{ended.reason}: {where}{what}" if what else ended.reason
