"""Who fits where: all nodes of a job or none (gang), on the first machines with room.

Amounts are whole numbers (thousandths of a core, bytes, devices), so that what is taken and given back always sums to
zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Amount(NamedTuple):
    """Resources of a worker, a node or a machine."""

    cpu_milli: int
    memory_bytes: int
    gpu: int

    def plus(self, other: Amount) -> Amount:
        return Amount(self.cpu_milli + other.cpu_milli, self.memory_bytes + other.memory_bytes, self.gpu + other.gpu)

    def minus(self, other: Amount) -> Amount:
        return Amount(self.cpu_milli - other.cpu_milli, self.memory_bytes - other.memory_bytes, self.gpu - other.gpu)

    def times(self, count: int) -> Amount:
        return Amount(self.cpu_milli * count, self.memory_bytes * count, self.gpu * count)

    def fits_in(self, room: Amount) -> bool:
        return self.cpu_milli <= room.cpu_milli and self.memory_bytes <= room.memory_bytes and self.gpu <= room.gpu

    def __str__(self) -> str:
        return f"{self.cpu_milli / 1000:g} cpu, {_bytes(self.memory_bytes)} memory, {self.gpu} gpu"


NOTHING = Amount(0, 0, 0)


class Demand(NamedTuple):
    """What a job needs at once: so many nodes, each of this size."""

    nodes: int
    node: Amount

    @property
    def total(self) -> Amount:
        return self.node.times(self.nodes)

    def __str__(self) -> str:
        return f"{self.nodes} node{'s' if self.nodes != 1 else ''} of {self.node}"


def place(demand: Demand, free: Mapping[str, Amount]) -> tuple[str, ...] | None:
    """The machine of each node, first fit; None when the gang does not fit as a whole. Nodes may share a machine."""
    chosen: list[str] = []
    node = demand.node
    for machine, room in free.items():
        while len(chosen) < demand.nodes and node.fits_in(room):
            chosen.append(machine)
            room = room.minus(node)
        if len(chosen) == demand.nodes:
            return tuple(chosen)
    return None


def take(free: dict[str, Amount], machines: tuple[str, ...], node: Amount) -> None:
    """Subtracts a placement from what is free."""
    for machine in machines:
        free[machine] = free[machine].minus(node)


def _bytes(count: int) -> str:
    for unit, size in (("Gi", 2**30), ("Mi", 2**20), ("Ki", 2**10)):
        if abs(count) >= size:
            return f"{count / size:.4g}{unit}"
    return str(count)
