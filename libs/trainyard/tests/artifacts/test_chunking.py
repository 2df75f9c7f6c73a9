"""Chunks depend on content alone."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from trainyard.artifacts.chunking import MAX_BYTES, MIN_BYTES, Cutter

KIB = 1024
MIB = 1024 * KIB


def chunks(data, window=None):
    """`data` in chunks, as somebody cuts it who sees `window` more bytes at a time."""
    cutter, found, start, end = Cutter(), [], 0, 0
    while start < len(data):
        end = min(len(data), end + (window or len(data)))
        for size in cutter.sizes(memoryview(data)[start:end], final=end == len(data)):
            found.append(data[start : start + size])
            start += size
    return found


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000),
    size=st.one_of(st.integers(0, 3 * MIB), st.sampled_from([MIN_BYTES, MAX_BYTES, MAX_BYTES + 1])),
    plain=st.integers(0, 3 * MIB),
    window=st.integers(50 * KIB, 2 * MIB),
)
def test_however_much_is_seen_at_a_time_the_chunks_are_the_same(seed, size, plain, window):
    data = random.Random(seed).randbytes(size) + bytes(plain)
    found = chunks(data, window)
    assert found == chunks(data)
    assert b"".join(found) == data
    assert all(MIN_BYTES <= len(chunk) <= MAX_BYTES for chunk in found[:-1])


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1000), at=st.floats(0, 1), removed=st.integers(0, MIB), added=st.binary(max_size=2000))
def test_an_edit_keeps_the_chunks_away_from_it(seed, at, removed, added):
    data = random.Random(seed).randbytes(12 * MIB)
    place = int(at * len(data))
    edited = data[:place] + added + data[place + removed :]
    fresh = set(chunks(edited)) - set(chunks(data))
    # The edit's own bytes, the rest of the chunks it touches, and the few until cuts fall together again.
    assert sum(map(len, fresh)) <= len(added) + 5 * MAX_BYTES


def test_content_without_structure_is_cut_at_the_largest_size():
    assert [len(chunk) for chunk in chunks(bytes(2 * MIB + 5))] == [MIB, MIB, 5]


def test_stored_versions_stay_deduplicated_because_cuts_never_change():
    data = random.Random(7).randbytes(2 * MIB)
    assert [len(chunk) for chunk in chunks(data)] == [264465, 320718, 263035, 285505, 407445, 280569, 275415]
