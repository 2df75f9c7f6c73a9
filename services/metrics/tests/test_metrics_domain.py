"""Pure rules: sampling and stitching."""

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from trainyard_metrics.domain.sampling import downsample
from trainyard_metrics.domain.stitch import Attempt, Cut, Resume, Segment, timeline

values = st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=300)


@settings(deadline=None)
@given(values=values, max_points=st.integers(3, 50))
def test_a_sample_is_small_in_order_and_keeps_the_extremes(values, max_points):
    kept = downsample(np.array(values, np.float64), max_points)
    assert len(kept) <= max_points or len(kept) == len(values) <= max_points
    assert list(kept) == sorted(set(kept.tolist()))
    numbers = [value for value in values if not math.isnan(value)]
    sample = [values[index] for index in kept if not math.isnan(values[index])]
    if numbers:
        assert (min(sample), max(sample)) == (min(numbers), max(numbers))


def test_a_line_of_resumes_is_followed_to_its_beginning():
    attempts = [
        Attempt("r1", 1),
        Attempt("r2", 2, Resume("c1", Cut({"w1": 5}))),
        Attempt("r3", 3, Resume("c2", Cut({"w2": 7}))),
    ]
    writers = {"r1": ["w1"], "r2": ["w2"], "r3": ["w3"]}
    assert timeline(attempts, writers.__getitem__) == [
        Segment("r1", 1, Cut({"w1": 5})),
        Segment("r2", 2, Cut({"w2": 7})),
        Segment("r3", 3),
    ]


def test_resuming_from_an_older_branch_leaves_the_newer_one_out():
    attempts = [
        Attempt("r1", 1),
        Attempt("r2", 2, Resume("", Cut())),
        Attempt("r3", 3, Resume("c1", Cut({"w1": 5}))),
    ]
    writers = {"r1": ["w1"], "r2": ["w2"], "r3": []}
    assert [segment.run_id for segment in timeline(attempts, writers.__getitem__)] == ["r1", "r3"]


def test_a_checkpoint_of_nobody_hides_everything_before():
    attempts = [Attempt("r1", 1), Attempt("r2", 2, Resume("c", Cut({"unknown": 5})))]
    assert [segment.run_id for segment in timeline(attempts, lambda run: ["w"])] == ["r2"]


def test_an_attempt_that_says_nothing_of_its_start_goes_on_where_the_last_ended():
    attempts = [Attempt("r2", 2), Attempt("r1", 1)]
    assert timeline(attempts, lambda run: []) == [Segment("r1", 1), Segment("r2", 2)]


@settings(deadline=None)
@given(values=values, max_points=st.integers(3, 50))
def test_a_sample_keeps_a_nan_of_every_bucket_that_has_one(values, max_points):
    kept = downsample(np.array(values, np.float64), max_points).tolist()
    missing = [index for index, value in enumerate(values) if math.isnan(value)]
    if len(values) > max_points and missing:
        buckets = max_points // 3
        bucket_of = [min(b for b in range(buckets) if index < (b + 1) * len(values) // buckets) for index in missing]
        assert {bucket_of[missing.index(index)] for index in kept if index in missing} == set(bucket_of)


def test_a_sample_of_a_million_points_has_the_spikes():
    values = np.zeros(1_000_000)
    values[[3, 500_000, 999_999]] = 5, math.nan, -math.inf
    assert {3, 500_000, 999_999} <= set(downsample(values, 1000).tolist())
