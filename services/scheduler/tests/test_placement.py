"""Where nodes go: never more than fits, never more machines than there may be, all of a gang or nothing."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainyard_scheduler.domain.admission import (
    NOTHING,
    Amount,
    Demand,
    Kind,
    Machine,
    Offer,
    Room,
    give_back,
    kind_of,
    place,
    take,
)
from trainyard_scheduler.domain.matching import Taint, Toleration, Wishes

GI = 1 << 30

amounts = st.builds(Amount, st.integers(0, 8), st.integers(0, 4), st.integers(0, 2), st.integers(0, 3))
sizes = st.builds(Amount, st.integers(1, 4), st.integers(0, 2), st.integers(0, 1), st.just(1))
kinds = st.builds(lambda most, total: Kind("k", most, total), st.integers(1, 3), amounts)
offers = st.builds(
    lambda machines, overhead, kind: Offer(
        {f"m{i}": Machine(size) for i, size in enumerate(machines)}, overhead, (), {"k": kind} if kind else {}
    ),
    st.lists(amounts, max_size=3),
    st.builds(Amount, st.integers(0, 1), st.integers(0, 1), st.just(0), st.just(0)),
    st.none() | kinds,
)
wishes = st.sampled_from(["", "spread", "pack"]).map(lambda topology: Wishes(topology=topology))
demands = st.builds(Demand, st.integers(1, 5), sizes, wishes)


def machine(cpu: int, pods: int = 110, labels: dict[str, str] | None = None, *taints: Taint) -> Machine:
    return Machine(Amount(cpu * 1000, 64 * GI, 0, pods), NOTHING, labels or {}, taints)


def demand(nodes: int = 1, cpu: int = 1, **wished: object) -> Demand:
    return Demand(nodes, Amount(cpu * 1000, GI, 0), Wishes(**wished))  # type: ignore[arg-type]


def placed(wanted: Demand, offer: Offer) -> list[str] | None:
    found = place(wanted, offer, Room.whole(offer))
    return None if found is None else list(found)


@given(offer=offers, queue=st.lists(demands, max_size=6))
def test_what_is_admitted_fits_and_needs_no_more_machines_than_there_may_be(offer: Offer, queue: list[Demand]) -> None:
    room = Room.whole(offer)
    taken: Counter[str] = Counter()
    used: dict[str, Amount] = {}
    for each in queue:
        chosen = place(each, offer, room)
        if chosen is None:
            continue
        assert len(chosen) == each.nodes
        take(room, offer, chosen, offer.size(each))
        for name in chosen:
            used[name] = used.get(name, NOTHING).plus(offer.size(each))
            taken[name] += 1
    for name, amount in used.items():
        kind = offer.kinds.get(kind_of(name))
        assert amount.fits_in(kind.total if kind else offer.machines[name].total)
    for kind in offer.kinds.values():
        assert sum(kind_of(name) == kind.name for name in used) <= kind.max


@given(offer=offers, wanted=demands)
def test_a_gang_that_is_refused_would_not_fit_any_way(offer: Offer, wanted: Demand) -> None:
    def count(size: Amount) -> int:
        fits = (n for n in range(wanted.nodes, 0, -1) if offer.size(wanted).times(n).fits_in(size))
        return next(fits, 0)

    fits = sum(count(each.total) for each in offer.machines.values())
    fits += sum(count(kind.total) * kind.max for kind in offer.kinds.values())
    assert (placed(wanted, offer) is not None) == (fits >= wanted.nodes)


@given(offer=offers, queue=st.lists(demands, max_size=6))
def test_what_is_given_back_leaves_everything_as_it_was(offer: Offer, queue: list[Demand]) -> None:
    room = Room.whole(offer)
    held = []
    for each in queue:
        if (chosen := place(each, offer, room)) is not None:
            take(room, offer, chosen, offer.size(each))
            held.append((chosen, offer.size(each)))
    for chosen, node in held:
        give_back(room, offer, chosen, node)
    whole = Room.whole(offer)
    assert (room.free, room.slots, room.more) == (whole.free, whole.slots, whole.more)


def test_every_node_takes_the_agents_share_beside_its_own() -> None:
    offer = Offer({"m0": machine(2)}, overhead=Amount(50, 96 << 20, 0, 1))
    each = Demand(1, Amount(100, 64 << 20, 0))
    room = Room.whole(offer)
    count = 0
    while (chosen := place(each, offer, room)) is not None:
        take(room, offer, chosen, offer.size(each))
        count += 1
    assert count == 13  # 2 cores hold 20 jobs of a tenth, and 13 with what their agents ask for


def test_a_machine_takes_no_more_pods_than_its_kubelet_does() -> None:
    offer = Offer({"m0": machine(64, pods=3)}, overhead=Amount(0, 0, 0, 1))
    assert placed(demand(3), offer) is not None
    assert placed(demand(4), offer) is None


def test_a_launcher_that_announces_neither_labels_nor_overhead_is_as_before() -> None:
    offer = Offer({"m0": Machine(Amount(4000, 64 * GI, 0))})
    assert placed(demand(4, selector=(("gpu", "a100"),)), offer) == ["m0"] * 4


@pytest.mark.parametrize(
    ("wished", "names"),
    [
        ({}, ["plain"]),
        ({"selector": (("gpu", "a100"),)}, ["a100"]),
        ({"selector": (("gpu", "h100"),)}, None),
        ({"tolerations": (Toleration("team", "Exists"),), "selector": (("gpu", "v100"),)}, ["tainted"]),
        ({"selector": (("gpu", "v100"),)}, None),
        ({"tolerations": (Toleration("team", "Equal", "ours"),), "selector": (("gpu", "v100"),)}, None),
        ({"tolerations": (Toleration("", "Exists"),), "selector": (("gpu", "v100"),)}, ["tainted"]),
        ({"tolerations": (Toleration("user", "Exists"),), "selector": (("gpu", "v100"),)}, None),
        ({"tolerations": (Toleration("team", "Exists", "", "NoExecute"),), "selector": (("gpu", "v100"),)}, None),
        ({"avoided": frozenset({"plain"})}, ["a100"]),
    ],
)
def test_a_job_goes_where_labels_and_taints_let_it(wished: dict[str, object], names: list[str] | None) -> None:
    offer = Offer(
        {
            "plain": machine(4, 110, {"host": "plain"}),
            "a100": machine(4, 110, {"gpu": "a100"}),
            "tainted": machine(4, 110, {"gpu": "v100"}, Taint("team", "theirs")),
        }
    )
    assert placed(demand(**wished), offer) == names


def test_nodes_that_ask_for_gpus_go_to_machines_that_are_for_them() -> None:
    taint = Taint("nvidia.com/gpu", "present")
    size = Amount(8000, 64 * GI, 8)
    offer = Offer(
        {"m0": Machine(size, NOTHING, {"a": "b"}, (taint,))},
        gpu_tolerations=(Toleration("nvidia.com/gpu", "Exists", "", "NoSchedule"),),
    )
    assert placed(Demand(1, Amount(1000, GI, 1)), offer) == ["m0"]
    assert placed(Demand(1, Amount(1000, GI, 0)), offer) is None


@pytest.mark.parametrize(
    ("topology", "machines"),
    [("", ["m0", "m1", "m1"]), ("spread", ["m0", "m1", "m2"]), ("pack", ["m1", "m1", "m1"])],
)
def test_nodes_are_spread_or_packed_where_there_is_a_choice(topology: str, machines: list[str]) -> None:
    offer = Offer({"m0": machine(1), "m1": machine(3), "m2": machine(1)})
    assert placed(demand(3, topology=topology), offer) == machines


def test_machines_that_exist_come_before_those_that_have_to_be_made() -> None:
    kind = Kind("a100", 2, Amount(2000, 64 * GI, 0, 10), machines=frozenset({"m1"}))
    offer = Offer({"m0": machine(1), "m1": machine(1)}, kinds={"a100": kind})
    assert placed(demand(2), offer) == ["m0", "m1"]
    assert placed(demand(4), offer) == ["m0", "m1", "a100#1", "a100#1"]
    assert placed(demand(5), offer) is None  # one of two machines of the kind is there already
