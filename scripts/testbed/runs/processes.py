"""The processes of a run, found by its mark in their environment: for those that are not in its control group."""

from __future__ import annotations

import os
import select
import signal
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from trainyard.proc import Process, open_process, processes

_PATIENCE_S = 60.0


def kill(mark: str, spared: str) -> None:
    """Ends every process with the mark, and those below it, and returns when none is left.

    Args:
        mark: `NAME=value` as it is in an environment.
        spared: name of a variable; a process that has it is left alone, with those below it.

    Raises:
        TimeoutError: one does not end.
    """
    while found := list(_family(mark.encode(), spared.encode())):
        for process in found:
            _end(process)


def _family(mark: bytes, spared: bytes) -> Iterator[Process]:
    children: dict[int, list[Process]] = defaultdict(list)
    marked = []
    for process in processes():
        if process.ended or process.pid == os.getpid():
            continue
        variables = _environment(process.pid)
        if any(variable.startswith(spared + b"=") for variable in variables):
            continue
        children[process.parent].append(process)
        if mark in variables:
            marked.append(process)
    seen: set[int] = set()
    while marked:
        process = marked.pop()
        if process.pid not in seen:
            seen.add(process.pid)
            marked += children[process.pid]
            yield process


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _end(process: Process) -> None:
    descriptor = open_process(process.pid, process.start_time)
    if descriptor is None:
        return
    try:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        if not select.select([descriptor], [], [], _PATIENCE_S)[0]:
            raise TimeoutError(f"process {process.pid} does not end")
    finally:
        os.close(descriptor)
