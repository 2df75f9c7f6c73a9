"""Who fits where: all nodes of a job or none (gang), on the first machines with room.

Amounts are whole numbers (thousandths of a core, bytes, devices, pods), so that what is taken and given back always
sums to zero.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import TYPE_CHECKING, NamedTuple

from trainyard_scheduler.domain.matching import NO_WISHES, Taint, Toleration, Wishes, selected, untolerated

if TYPE_CHECKING:
    from trainyard.spec.allowed import AllowedPods


class Amount(NamedTuple):
    """Resources of a worker, a node or a machine."""

    cpu_milli: int
    memory_bytes: int
    gpu: int
    pods: int = 0

    def plus(self, other: Amount) -> Amount:
        return Amount(
            self.cpu_milli + other.cpu_milli,
            self.memory_bytes + other.memory_bytes,
            self.gpu + other.gpu,
            self.pods + other.pods,
        )

    def minus(self, other: Amount) -> Amount:
        return Amount(
            self.cpu_milli - other.cpu_milli,
            self.memory_bytes - other.memory_bytes,
            self.gpu - other.gpu,
            self.pods - other.pods,
        )

    def times(self, count: int) -> Amount:
        return Amount(self.cpu_milli * count, self.memory_bytes * count, self.gpu * count, self.pods * count)

    def fits_in(self, room: Amount) -> bool:
        return (
            self.cpu_milli <= room.cpu_milli
            and self.memory_bytes <= room.memory_bytes
            and self.gpu <= room.gpu
            and self.pods <= room.pods
        )

    def count_in(self, room: Amount, most: int) -> int:
        """How often it fits in the room, at most so often."""
        if not self.fits_in(room):
            return 0
        return min((most, *(has // need for need, has in zip(self, room, strict=True) if need)))

    def __str__(self) -> str:
        return f"{self.cpu_milli / 1000:g} cpu, {_bytes(self.memory_bytes)} memory, {self.gpu} gpu"


NOTHING = Amount(0, 0, 0)


class Demand(NamedTuple):
    """What a job needs at once: so many nodes, each of this size, on machines that it accepts."""

    nodes: int
    node: Amount
    wishes: Wishes = NO_WISHES

    @property
    def total(self) -> Amount:
        return self.node.times(self.nodes)

    def __str__(self) -> str:
        return f"{self.nodes} node{'s' if self.nodes != 1 else ''} of {self.node}"


class Machine(NamedTuple):
    """A machine as its launcher announced it."""

    total: Amount  # for jobs
    others: Amount = NOTHING  # what others than jobs hold beside
    labels: Mapping[str, str] = {}
    taints: tuple[Taint, ...] = ()


class Kind(NamedTuple):
    """Machines that a cluster makes when pods need them."""

    name: str
    max: int
    total: Amount
    labels: Mapping[str, str] = {}
    taints: tuple[Taint, ...] = ()
    provision_timeout_s: float = 900.0
    machines: frozenset[str] = frozenset()  # those there are, usable or not

    @property
    def missing(self) -> int:
        """How many more there may be."""
        return max(0, self.max - len(self.machines))


class Offer(NamedTuple):
    """What a launcher announced of its pool.

    Attributes:
        overhead: what each node of an attempt takes beside what its job asks for.
        gpu_tolerations: of nodes that ask for GPUs, beside those of their job.
        unusable: machines that take nothing now.
        allowed_pods: what pods may ask for; None: anything.
    """

    machines: Mapping[str, Machine]
    overhead: Amount = NOTHING
    gpu_tolerations: tuple[Toleration, ...] = ()
    kinds: Mapping[str, Kind] = {}
    unusable: Mapping[str, Machine] = {}
    allowed_pods: AllowedPods | None = None

    @property
    def mended(self) -> Offer:
        """What it would be if all machines could be used."""
        return self._replace(machines={**self.machines, **self.unusable}, unusable={})

    def size(self, demand: Demand) -> Amount:
        """What a node of the job takes of a machine here."""
        return demand.node.plus(self.overhead)

    def accepts(self, demand: Demand, name: str, labels: Mapping[str, str], taints: tuple[Taint, ...]) -> bool:
        """Whether a machine and a job accept each other, room aside."""
        wishes = demand.wishes
        if name in wishes.avoided or not selected(wishes.selector, labels):
            return False
        return not taints or not untolerated(taints, self.tolerations(demand))

    def tolerations(self, demand: Demand) -> tuple[Toleration, ...]:
        """Those of a node of the job here."""
        own = demand.wishes.tolerations
        return (*own, *self.gpu_tolerations) if demand.node.gpu else own


class Eligible(NamedTuple):
    """The machines and kinds of a pool that a job accepts and that accept it."""

    machines: tuple[str, ...]
    kinds: tuple[str, ...]


class Slot(NamedTuple):
    """A machine of a kind that attempts were promised and that is not announced yet."""

    kind: str
    free: Amount


class Room:
    """What is free of a pool."""

    __slots__ = ("arrived", "free", "more", "slots")

    def __init__(
        self,
        free: dict[str, Amount],
        slots: dict[str, Slot],
        more: dict[str, int],
        arrived: Set[str] = frozenset(),
    ) -> None:
        self.free = free
        self.slots = slots
        self.more = more  # by kind, how many machines more can be promised
        self.arrived = arrived  # promised machines that exist by now: their names are not free for other promises

    @classmethod
    def whole(cls, offer: Offer, *, others_gone: bool = False) -> Room:
        """That of a pool without jobs, also without what others hold when they are gone."""
        return cls(
            {
                name: machine.total.plus(machine.others) if others_gone else machine.total
                for name, machine in offer.machines.items()
            },
            {},
            {kind.name: kind.missing for kind in offer.kinds.values()},
        )

    def copy(self) -> Room:
        return Room(dict(self.free), dict(self.slots), dict(self.more), self.arrived)


_SLOT = "#"  # in no name of a machine or kind


def kind_of(name: str) -> str:
    """The kind of a promised machine; "" for the name of one that exists."""
    return name.rpartition(_SLOT)[0]


def eligible(demand: Demand, offer: Offer) -> Eligible:
    """What of a pool a job accepts, in the order in which it is tried."""
    return Eligible(
        tuple(
            name
            for name, machine in offer.machines.items()
            if offer.accepts(demand, name, machine.labels, machine.taints)
        ),
        tuple(kind.name for kind in offer.kinds.values() if offer.accepts(demand, "", kind.labels, kind.taints)),
    )


def place(demand: Demand, offer: Offer, room: Room, among: Eligible | None = None) -> tuple[str, ...] | None:
    """The machine of each node, first fit; None when the gang does not fit as a whole. Nodes may share a machine.

    Machines that exist come first, then those that are promised to others and have room left, then new ones.

    Args:
        among: as `eligible` says, when that is known.
    """
    among = among or eligible(demand, offer)
    node, topology = offer.size(demand), demand.wishes.topology
    found: dict[str, int] = {}
    left = demand.nodes
    for candidates in (
        ((name, room.free[name]) for name in among.machines),
        ((name, slot.free) for name, slot in room.slots.items() if slot.kind in among.kinds),
        _new(among.kinds, offer, room),
    ):
        for name, size in candidates:
            count = node.count_in(size, demand.nodes)
            if count:
                found[name] = count
                left -= count
                if left <= 0 and (not topology or kind_of(name)):
                    break
        if left <= 0:
            return _chosen(found, demand.nodes, topology)
    return None


def _chosen(found: Mapping[str, int], nodes: int, topology: str) -> tuple[str, ...]:
    """The machine of each node, of machines that hold so many."""
    if topology == "spread":
        rounds = range(max(found.values(), default=0))
        names = (name for turn in rounds for name, count in found.items() if turn < count)
    else:
        order = sorted(found.items(), key=lambda entry: -entry[1]) if topology == "pack" else found.items()
        names = (name for name, count in order for _ in range(count))
    return tuple(itertools.islice(names, nodes))


def _new(kinds: Iterable[str], offer: Offer, room: Room) -> Iterator[tuple[str, Amount]]:
    for kind in kinds:
        numbered = (f"{kind}{_SLOT}{number}" for number in itertools.count(1))
        names = (name for name in numbered if name not in room.slots and name not in room.arrived)
        for name in itertools.islice(names, max(0, room.more.get(kind, 0))):
            yield name, offer.kinds[kind].total


def take(room: Room, offer: Offer, machines: Iterable[str], node: Amount) -> None:
    """Subtracts a placement from what is free; promises the machines in it that are new."""
    for name in machines:
        if name in room.free:
            room.free[name] = room.free[name].minus(node)
        elif (slot := room.slots.get(name)) is not None:
            room.slots[name] = slot._replace(free=slot.free.minus(node))
        else:
            promise(room, offer, name, kind_of(name), node)


def promise(room: Room, offer: Offer, name: str, kind: str, node: Amount) -> None:
    """A machine of a kind that is not announced is taken by a node, for the first time. One of no kind that is known
    counts for nothing."""
    known = offer.kinds.get(kind)
    if known is None:
        return
    room.slots[name] = Slot(kind, known.total.minus(node))
    if name not in known.machines:
        room.more[kind] -= 1


def give_back(room: Room, offer: Offer, machines: Iterable[str], node: Amount) -> None:
    """Adds a placement to what is free; a promised machine that nothing needs any more is promised no longer."""
    for name in machines:
        if name in room.free:
            room.free[name] = room.free[name].plus(node)
        elif (slot := room.slots.get(name)) is not None:
            kind = offer.kinds[slot.kind]
            free = slot.free.plus(node)
            if free != kind.total:
                room.slots[name] = slot._replace(free=free)
                continue
            del room.slots[name]
            if name not in kind.machines:
                room.more[slot.kind] += 1


def _bytes(count: int) -> str:
    for unit, size in (("Gi", 2**30), ("Mi", 2**20), ("Ki", 2**10)):
        if abs(count) >= size:
            return f"{count / size:.4g}{unit}"
    return str(count)
