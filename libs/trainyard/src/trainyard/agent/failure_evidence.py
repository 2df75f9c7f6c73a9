"""What a worker that failed left about it: the exception it raised, and whether it only lost another worker.

Torch's `record` decorator leaves an error file. A program without it leaves a traceback in its output.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from trainyard.agent.contract import error_file, output_file

TAIL_BYTES = 64 * 1024
SHOWN_LINES = 20
_MESSAGE_MOST = 500

_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")  # torch puts it in front of a traceback's lines
_TRACEBACK = "Traceback (most recent call last):"
_RAISED = re.compile(r"^([A-Za-z_][\w.]*)(?:: (.*))?$")
# What gloo, NCCL and torch's store say when the process at the other end is gone.
_LOST_PEER = re.compile(
    r"gloo/transport/|Connection closed by remote peer|remote process exited|ncclRemoteError|"
    r"NCCL communicator was aborted|Watchdog caught collective operation timeout|"
    r"Did the remote server shutdown or crash|failed to recv, got 0 bytes|sendBytes failed"
)
# How the installed torchrun begins to report a worker that failed, and how it ends.
_TORCHRUN_BEGINS = re.compile(r"elastic[./]multiprocessing[./]api.*\] (Sending process|failed \()")
_TORCHRUN_ROOT = re.compile(
    r"Root Cause \(first observed failure\):.*?rank +: (\d+) \(local_rank: (\d+)\)\s+exitcode +: (-?\d+) ", re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of a worker's failure beside its exit status.

    Attributes:
        exception: type and first line of the message; None when none is known.
        lost_peer: whether its own words say that another worker went away.
        recorded_ns: when the exception was recorded; 0 when it was not.
    """

    exception: tuple[str, str] | None
    lost_peer: bool
    recorded_ns: int = 0


@dataclass(frozen=True, slots=True)
class OfTorchrun:
    """The worker that failed first, as the installed torchrun reports it, and the lines before that report."""

    rank: int
    local_rank: int
    code: int  # negative for a signal
    lines: list[str]


def read(folder: str, output_rank: int, rank: int | None = None) -> Evidence:
    """What a worker of this node left.

    Args:
        output_rank: under which its output is kept.
        rank: its own, where that is another.
    """
    recorded = _recorded(error_file(folder, output_rank))
    lines = before_torchruns_report(tail(folder, output_rank))
    exception = recorded[0] if recorded else _from_traceback(_of_rank(lines, output_rank if rank is None else rank))
    told = ": ".join(exception) if exception else "\n".join(lines[-SHOWN_LINES:])
    return Evidence(exception, _LOST_PEER.search(told) is not None, recorded[1] if recorded else 0)


def of_torchrun(folder: str, rank: int) -> OfTorchrun | None:
    """Returns which worker made the installed torchrun fail, if its report names one.

    Args:
        rank: under which its output is kept.
    """
    lines = tail(folder, rank)
    found = _TORCHRUN_ROOT.search("\n".join(lines))
    if found is None:
        return None
    return OfTorchrun(int(found[1]), int(found[2]), int(found[3]), before_torchruns_report(lines)[-SHOWN_LINES:])


def tail(folder: str, rank: int) -> list[str]:
    """The last lines of a worker's output, at most `TAIL_BYTES`."""
    try:
        with Path(output_file(folder, rank)).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            data = file.read(TAIL_BYTES)
    except OSError:
        return []
    lines = data.decode(errors="replace").splitlines()
    return lines[1:] if size > TAIL_BYTES else lines  # the first one is cut


def before_torchruns_report(lines: list[str]) -> list[str]:
    """What the workers wrote, without what the installed torchrun adds about their end."""
    for index, line in enumerate(lines):
        if _TORCHRUN_BEGINS.search(line):
            return lines[:index]
    return lines


def _recorded(path: str) -> tuple[tuple[str, str], int] | None:
    """The exception that torch's `record` decorator noted, and when."""
    try:
        with Path(path).open() as file:
            message = json.load(file)["message"]
            noted_ns = os.fstat(file.fileno()).st_mtime_ns
        text = str(message["message"] if isinstance(message, dict) else message)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    name, _, words = text.partition(": ")
    return (name, _first_line(words)), noted_ns


def _of_rank(lines: list[str], rank: int) -> list[str]:
    """The lines that torch marked as those of a rank, without the mark; all, when it marked none."""
    marked = [line for line in lines if line.startswith(f"[rank{rank}]:")]
    return [_RANK_PREFIX.sub("", line) for line in marked or lines]


def _from_traceback(plain: list[str]) -> tuple[str, str] | None:
    """The exception of the last traceback, when it ends within the lines that are shown."""
    begun = max((index for index, line in enumerate(plain) if line.strip() == _TRACEBACK), default=None)
    if begun is None:
        return None
    for index in range(begun + 1, len(plain)):
        line = plain[index]
        if line and not line[0].isspace() and (found := _RAISED.match(line)):
            return (found[1], _first_line(found[2] or "")) if index >= len(plain) - SHOWN_LINES else None
    return None


def _first_line(text: str) -> str:
    return next(iter(text.splitlines()), "")[:_MESSAGE_MOST]
