"""What each worker's process tree uses, read from /proc."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass

from trainyard_protos.v1 import common_pb2

from trainyard.agent.gpu import Gpus
from trainyard.agent.processes import descendants

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Target:
    """A process tree to watch: its root, and the devices it was given."""

    rank: int
    pid: int
    gpus: tuple[int, ...] = ()


class Sampler:
    """Samples process trees; CPU use is that since the sample before.

    Attributes:
        newest: the newest usage by rank.
        peak_bytes: the most resident memory of all trees together that a sample has seen.
    """

    def __init__(self, targets: Iterable[Target], gpus: Gpus) -> None:
        self._targets = tuple(targets)
        self._gpus = gpus
        self._before: dict[int, tuple[float, dict[int, int]]] = {}
        self.newest: dict[int, common_pb2.Usage] = {}
        self.peak_bytes = 0

    def sample(self) -> dict[int, common_pb2.Usage]:
        """The usage of every tree that still has a process, by rank."""
        self.newest = {target.rank: usage for target in self._targets if (usage := self._of_tree(target)) is not None}
        self.peak_bytes = max(self.peak_bytes, sum(usage.memory_bytes for usage in self.newest.values()))
        return self.newest

    def _of_tree(self, target: Target) -> common_pb2.Usage | None:
        now = time.monotonic()
        ticks: dict[int, int] = {}
        memory = 0
        for pid in (target.pid, *descendants(target.pid)):
            found = _read(pid)
            if found is not None:
                ticks[pid] = found[0]
                memory += found[1]
        if target.pid not in ticks:
            return None
        at, before = self._before.get(target.rank, (now, ticks))
        self._before[target.rank] = (now, ticks)
        # Process by process: one that ended between two samples must not make the sum negative.
        used = sum(count - before.get(pid, 0) for pid, count in ticks.items())
        usage = common_pb2.Usage(memory_bytes=memory, cpu=used / _TICKS_PER_S / (now - at) if now > at else 0.0)
        for device in target.gpus:
            reading = self._gpus.read(device)
            if reading is not None:
                usage.gpu.append(reading[0])
                usage.gpu_memory_bytes.append(reading[1])
        return usage


def points_of(usage: common_pb2.Usage) -> list[tuple[str, float]]:
    """A usage as named values of the run's system metrics."""
    points = [("system/cpu", usage.cpu), ("system/memory_bytes", float(usage.memory_bytes))]
    for index, utilisation in enumerate(usage.gpu):
        points.append((f"system/gpu{index}", utilisation))
        points.append((f"system/gpu{index}_memory_bytes", float(usage.gpu_memory_bytes[index])))
    return points


def _read(pid: int) -> tuple[int, int] | None:
    """CPU ticks and resident bytes of a process; None when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
    except OSError:
        return None
    fields = stat[stat.rindex(b")") + 2 :].split(maxsplit=22)
    return int(fields[11]) + int(fields[12]), int(fields[21]) * _PAGE_BYTES
