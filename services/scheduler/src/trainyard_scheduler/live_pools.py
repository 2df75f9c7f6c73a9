"""The pools of launchers as the index keeps them: what each offers, what attempts hold of it, and what is free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from trainyard_scheduler.domain.admission import (
    Amount,
    Demand,
    Eligible,
    Offer,
    Room,
    eligible,
    give_back,
    kind_of,
    place,
    promise,
    take,
)
from trainyard_scheduler.domain.matching import Wishes
from trainyard_scheduler.domain.pending import PoolView


class Holding(NamedTuple):
    """What an attempt holds until it is over."""

    pool: str
    machines: tuple[str, ...]
    node: Amount
    created_ns: int
    kinds: tuple[str, ...] = ()  # by node, of machines that were promised when it was admitted

    @property
    def awaited(self) -> Counter[str]:
        """How many of its nodes wait for a machine of each kind."""
        return Counter(kind for name in self.machines if (kind := kind_of(name)))


@dataclass(slots=True)
class LivePool:
    """A pool as it was last announced."""

    name: str
    launcher_id: str
    lease_s: float
    offer: Offer
    alive: bool
    seen_ns: int
    blocked_until_ns: dict[str, int] = field(default_factory=dict)  # by kind: until then no attempt waits for it
    last_claim_ns: int = 0  # by the steady clock
    newest_claimed: str = ""  # id of the newest attempt that was claimed: ids grow
    room: Room = field(init=False)
    born_ns: dict[str, int] = field(default_factory=dict)  # when each machine was first announced
    stand_ins: dict[str, str] = field(default_factory=dict)  # machines that came for promised ones
    _eligible: dict[tuple[Wishes, bool], Eligible] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.room = Room.whole(self.offer)

    def view(self) -> PoolView:
        room = self.open_room() if self.blocked_until_ns else self.room
        return PoolView(self.name, self.alive, self.offer, room, self.blocked_until_ns)

    def open_room(self) -> Room:
        """A copy of what is free, without machines of kinds that are blocked."""
        room = self.room.copy()
        room.more.update(dict.fromkeys(self.blocked_until_ns, 0))
        return room

    def place(self, demand: Demand, room: Room) -> tuple[str, ...] | None:
        """See `admission.place`."""
        key = demand.wishes, demand.node.gpu > 0  # nothing else of a demand says which machines it accepts
        among = self._eligible.get(key)
        if among is None:
            among = self._eligible[key] = eligible(demand, self.offer)
        return place(demand, self.offer, room, among)

    def follow(self, before: LivePool, now_ns: int) -> None:
        """Keeps what is known of the pool beside what was announced."""
        self.last_claim_ns, self.newest_claimed = before.last_claim_ns, before.newest_claimed
        known = dict.fromkeys(before.offer.machines, 0) | before.born_ns
        self.born_ns = {name: known.get(name, now_ns) for name in self.offer.machines}
        self.blocked_until_ns = {
            kind: until_ns for kind, until_ns in before.blocked_until_ns.items() if kind in self.offer.kinds
        }

    def settle(self, holdings: Iterable[Holding]) -> None:
        """Computes what is free from what attempts hold."""
        held = list(holdings)
        self.room = Room.whole(self.offer)
        self.stand_ins = self._stand_ins(held) if self.offer.kinds else {}
        self.room.arrived = self.stand_ins.keys()
        for holding in held:
            self.take(holding)

    def _stand_ins(self, held: list[Holding]) -> dict[str, str]:
        """Which new machine of a kind will be the one that was promised: the cluster's word on it comes soon."""
        taken = {name for holding in held for name in holding.machines}
        found: dict[str, str] = {}
        for holding in sorted(held, key=lambda each: each.created_ns):
            for slot in holding.machines:
                kind = self.offer.kinds.get(kind_of(slot))
                if kind is None or slot in found:
                    continue
                for name in self.offer.machines:
                    if name in kind.machines and name not in taken and self.born_ns.get(name, 0) >= holding.created_ns:
                        taken.add(name)
                        found[slot] = name
                        break
        return found

    def take(self, holding: Holding) -> None:
        """An attempt holds this from now on."""
        for name, kind in self._machines(holding):
            if name in self.room.free or name in self.room.slots:
                take(self.room, self.offer, (name,), holding.node)
            else:  # it was promised, or the cluster has it and it is not announced yet, or it has left
                promise(self.room, self.offer, name, kind, holding.node)

    def give_back(self, holding: Holding) -> None:
        """An attempt does not hold this any more."""
        give_back(self.room, self.offer, [name for name, _ in self._machines(holding)], holding.node)

    def _machines(self, holding: Holding) -> Iterable[tuple[str, str]]:
        kinds = holding.kinds or [kind_of(name) for name in holding.machines]
        return [(self.stand_ins.get(name, name), kind) for name, kind in zip(holding.machines, kinds, strict=True)]


def first_fit(demand: Demand, rooms: Iterable[tuple[LivePool, Room]]) -> tuple[LivePool, Room, tuple[str, ...]] | None:
    """The first pool that holds a job on machines that exist, else the first that holds it once it has grown."""
    grows = None
    for pool, room in rooms:
        machines = pool.place(demand, room)
        if machines is not None and not any(map(kind_of, machines)):
            return pool, room, machines
        if machines is not None and grows is None:
            grows = pool, room, machines
    return grows
