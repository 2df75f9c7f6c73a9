"""Which versions a rule keeps, by what the parts of it say on their own; and which packs are rewritten."""

import math

from hypothesis import given
from hypothesis import strategies as st
from trainyard_artifacts.chunks import RUN_BYTES, runs
from trainyard_artifacts.domain.retention import Candidate, Rule, superfluous
from trainyard_artifacts.domain.rewriting import Occupancy, groups
from trainyard_artifacts.index import Place

NOW_NS = 10**18
ages_s = st.integers(0, 100)
scores = st.one_of(st.floats(allow_nan=True, allow_infinity=True), st.none())
rules = st.builds(
    Rule,
    keep_last=st.integers(0, 4),
    keep_best=st.integers(0, 4),
    best_metric=st.just("loss"),
    best_mode=st.sampled_from(["min", "max"]),
    ttl_s=st.sampled_from([0.0, 50.0]),
)


@st.composite
def versions(draw):
    drawn = draw(st.lists(st.tuples(ages_s, scores, st.booleans()), max_size=12))
    return [
        Candidate(
            id=str(number),
            order=number,
            created_ns=NOW_NS - age * 10**9,
            metrics={} if score is None else {"loss": score},
            pinned=pinned,
        )
        for number, (age, score, pinned) in enumerate(drawn, start=1)
    ]


@given(rules, versions())
def test_a_version_goes_only_when_no_part_of_the_rule_keeps_it(rule, found):
    gone = set(superfluous(rule, found, NOW_NS))
    if not (rule.keep_last or rule.keep_best or rule.ttl_s):
        assert not gone
        return
    sign = -1 if rule.best_mode == "max" else 1
    finite = [v for v in found if math.isfinite(v.metrics.get("loss", math.nan))]
    best = sorted(finite, key=lambda v: (sign * v.metrics["loss"], -v.order))[: rule.keep_best]
    for version in found:
        kept = (
            version.pinned
            or version.order > len(found) - rule.keep_last
            or NOW_NS - version.created_ns < rule.ttl_s * 10**9
            or version in best
        )
        assert (version.id in gone) is not kept


sizes = st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 10_000), st.floats(0, 1)), max_size=30)


@given(sizes)
def test_hollow_packs_are_rewritten_each_once_and_with_those_of_their_workspace(drawn):
    packs = [Occupancy(w, str(i), size + 100, size, int(size * part)) for i, (w, size, part) in enumerate(drawn)]
    made = list(groups(packs, below=0.5, batch_bytes=5000))
    chosen = [pack for group in made for pack in group]
    assert len(set(chosen)) == len(chosen)
    assert set(chosen) >= {pack for pack in packs if 0 < pack.living < 0.5 * pack.data}
    for group in made:
        assert len({pack.workspace for pack in group}) == 1
        assert len(group) == 1 or sum(pack.living for pack in group) <= 5000


@given(st.lists(st.tuples(st.sampled_from("pq"), st.integers(1, RUN_BYTES)), max_size=20), st.randoms())
def test_reads_cover_every_chunk_in_the_order_asked_for(drawn, random):
    ends = {"p": 8, "q": 8}
    places = {}
    for number, (pack, size) in enumerate(drawn):
        places[bytes([number])] = Place(pack, ends[pack], size)
        ends[pack] += size
    order = list(places)
    if random.random() < 0.5:
        random.shuffle(order)
    found = list(runs(order, places))
    assert [entry.hash for run in found for entry in run.entries] == order
    for run in found:
        assert run.size <= RUN_BYTES
        assert run.size == sum(entry.size for entry in run.entries)
        assert {places[entry.hash].pack for entry in run.entries} == {run.pack}
