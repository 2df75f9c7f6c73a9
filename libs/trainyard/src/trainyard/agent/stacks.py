"""Python stacks of running workers, taken from outside by py-spy."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from trainyard_protos.v1 import launcher_pb2

from trainyard.agent.processes import Reaper, descendants
from trainyard.agent.spawn import CannotStart, Started

DUMP_TIMEOUT_S = 20.0


async def take_stacks(workers: Sequence[Started], reaper: Reaper) -> list[launcher_pb2.RankStacks]:
    """The stacks of every worker and of the Python processes below it; what failed says so in `error`."""
    return [await _of_worker(each, reaper) for each in workers]


async def _of_worker(started: Started, reaper: Reaper) -> launcher_pb2.RankStacks:
    result = launcher_pb2.RankStacks(rank=started.worker.rank, pid=started.pid)
    pythons = [pid for pid in (started.pid, *descendants(started.pid)) if _is_python(pid)]
    if not pythons:
        result.error = f"process {started.pid} and those below it run no Python"
        return result
    for pid in pythons:
        code, text = await _dump(pid, reaper)
        if code == 0:
            result.text += text
        else:
            result.error = text.strip() or f"py-spy ended with {code}"
    return result


async def _dump(pid: int, reaper: Reaper) -> tuple[int, str]:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "stacks"
        command = [str(Path(sys.executable).parent / "py-spy"), "dump", "--pid", str(pid)]
        try:
            code = await reaper.run(
                command, log=output, cwd=Path(folder), env=dict(os.environ), timeout_s=DUMP_TIMEOUT_S
            )
        except CannotStart as error:
            return 1, str(error)
        except TimeoutError:
            return 1, f"py-spy got no stacks of process {pid} within {DUMP_TIMEOUT_S:.0f} s"
        return code, output.read_text(errors="replace")


def _is_python(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/exe").readlink().name.startswith("python")
    except OSError:
        return False
