"""Chunks depend on content alone."""

import io
import os
import random
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from trainyard.artifacts import UnsafePath, describe
from trainyard.artifacts.chunking import MAX_BYTES, MIN_BYTES, read_chunks, split

MIB = 1024 * 1024


class Dribble(io.RawIOBase):
    """A file that gives less than it is asked for."""

    def __init__(self, data, sizes):
        self._data, self._sizes, self._at = data, sizes, 0

    def read(self, size=-1):
        given = min(size, self._sizes[self._at % len(self._sizes)])
        self._at += 1
        data, self._data = self._data[:given], self._data[given:]
        return data


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 1000),
    size=st.sampled_from([0, 1, MIB, 9 * MIB, 20 * MIB]),
    sizes=st.lists(st.integers(100_000, 9 * MIB), min_size=1, max_size=4),
)
def test_however_a_file_is_read_its_chunks_are_the_same(seed, size, sizes):
    data = random.Random(seed).randbytes(size)
    whole = [data[offset : offset + length] for offset, length in split(data)] if data else []
    chunks = list(read_chunks(Dribble(data, sizes)))
    assert chunks == whole
    assert b"".join(chunks) == data
    assert all(MIN_BYTES <= len(chunk) <= MAX_BYTES for chunk in chunks[:-1])


def test_an_insertion_keeps_most_chunks():
    data = random.Random(1).randbytes(40 * MIB)
    before = {blake3(chunk).digest() for chunk in read_chunks(io.BytesIO(data))}
    after = {blake3(chunk).digest() for chunk in read_chunks(io.BytesIO(b"x" * 1000 + data))}
    assert len(after - before) <= 3


def test_content_without_structure_is_cut_at_the_largest_size():
    assert [len(chunk) for chunk in read_chunks(io.BytesIO(bytes(9 * MIB)))] == [4 * MIB, 4 * MIB, MIB]


async def test_what_is_not_a_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UnsafePath, match="not a regular file"):
        await describe(tmp_path)


async def test_a_path_outside_of_the_tree_is_refused(tmp_path):
    (tmp_path / "tree").mkdir()
    (tmp_path / "secret").write_text("x")
    for path in (tmp_path / "secret", Path("../secret")):
        with pytest.raises(UnsafePath):
            await describe(tmp_path / "tree", [path])
