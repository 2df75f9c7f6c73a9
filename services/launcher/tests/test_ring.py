"""Recent output in bounded memory."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from trainyard_launcher.ring import Cursor, Gap, Ring
from trainyard_protos.v1 import common_pb2


def line(seq: int, node: int = 0, text: str = "") -> common_pb2.LogLine:
    return common_pb2.LogLine(seq=seq, node=node, text=text)


def read_all(ring: Ring, cursor: Cursor, limit: int = 3) -> list[common_pb2.LogLine | Gap]:
    found = []
    while ring.behind(cursor):
        found += ring.read(cursor, limit)
    return found


def test_lines_that_come_again_are_skipped() -> None:
    ring = Ring(10, 10_000)
    assert ring.append([line(0), line(1)])
    assert not ring.append([line(0), line(1)])
    assert [each.seq for each in read_all(ring, Cursor())] == [0, 1]


def test_memory_is_bounded_by_bytes_but_one_line_always_stays() -> None:
    ring = Ring(1000, 1000)
    ring.append([line(seq, text="x" * 5000) for seq in range(5)])
    assert read_all(ring, Cursor(), limit=10) == [Gap(0, 0, 4), line(4, text="x" * 5000)]


def test_what_is_gone_for_good_is_told_at_the_end() -> None:
    ring = Ring(1, 10_000)
    ring.append([line(0, node=0), line(1, node=0), line(0, node=1)])
    cursor = Cursor()
    read_all(ring, cursor)
    assert ring.rest(cursor) == [Gap(0, 0, 2)]


operations = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(0, 1), st.integers(1, 6)), st.tuples(st.just("read"), st.integers(1, 4))
    ),
    max_size=60,
)


@given(operations, st.integers(1, 8))
def test_a_reader_gets_every_line_once_in_order_or_is_told_that_it_is_gone(steps: list[tuple], size: int) -> None:
    ring, cursor = Ring(size, 1_000_000), Cursor()
    written, covered = {0: 0, 1: 0}, {0: 0, 1: 0}

    def take(items: list[common_pb2.LogLine | Gap]) -> None:
        for item in items:
            begin, end = (item.from_seq, item.to_seq) if isinstance(item, Gap) else (item.seq, item.seq + 1)
            assert begin == covered[item.node] < end
            covered[item.node] = end

    for kind, *arguments in steps:
        if kind == "write":
            node, count = arguments
            ring.append([line(written[node] + offset, node) for offset in range(count)])
            written[node] += count
        else:
            take(ring.read(cursor, arguments[0]))
    take(read_all(ring, cursor))
    take(ring.rest(cursor))
    assert covered == written
