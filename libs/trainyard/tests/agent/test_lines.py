"""Output becomes lines, the same ones however it arrives."""

from hypothesis import given
from hypothesis import strategies as st
from trainyard.agent.lines import MAX_LINE_BYTES, Flood, LineSplitter

pieces = st.sampled_from(
    [b"a", b"bc", "é".encode(), "漢".encode(), b"\r", b"\n", b"\r\n", b"x" * 40_000, b"\xff", b" "]
)
streams = st.lists(pieces, max_size=40).map(b"".join)


def split(data: bytes, cuts: list[int]) -> list[str]:
    splitter = LineSplitter()
    lines = []
    for start, stop in zip([0, *cuts], [*cuts, len(data)], strict=True):
        lines += splitter.feed(data[start:stop])
    return lines + splitter.end()


@given(data=streams, cuts=st.lists(st.integers(0, 200_000), max_size=10))
def test_lines_do_not_depend_on_how_the_bytes_arrive(data, cuts):
    assert split(data, sorted(min(cut, len(data)) for cut in cuts)) == split(data, [])


@given(data=streams, at=st.integers(0, 200_000))
def test_who_begins_at_the_pending_bytes_gets_the_same_lines(data, at):
    first, second = LineSplitter(), LineSplitter()
    at = min(at, len(data))
    lines = first.feed(data[:at])
    lines += second.feed(data[at - first.pending :])
    assert lines + second.end() == split(data, [])


@given(data=streams)
def test_no_line_is_longer_than_allowed(data):
    assert all(len(line.encode()) <= 3 * MAX_LINE_BYTES for line in split(data, []))
    assert all(len(line) <= MAX_LINE_BYTES for line in split(data, []))


@given(lines=st.lists(st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"])), max_size=20))
def test_ordinary_lines_come_through_unchanged(lines):
    assert split("".join(f"{line}\n" for line in lines).encode(), []) == lines


@given(text=st.text(st.sampled_from("aé漢🚂"), max_size=12).map(lambda end: "a" * (MAX_LINE_BYTES - 6) + end))
def test_a_long_line_is_split_between_characters_and_loses_nothing(text):
    parts = split(f"{text}\n".encode(), [])
    assert "".join(parts) == text
    assert all(len(part.encode()) <= MAX_LINE_BYTES for part in parts)


def test_of_a_progress_bar_the_last_state_is_the_line():
    assert split(b"10%\r20%\r30%\ndone\n", []) == ["30%", "done"]


def test_windows_line_ends_are_line_ends():
    assert split(b"one\r\ntwo\r\n", [4]) == ["one", "two"]


def test_a_last_line_without_an_end_is_a_line():
    assert split(b"one\ntwo", []) == ["one", "two"]


def test_what_is_no_text_is_replaced_not_lost():
    assert split(b"a\xffb\n", []) == ["a\N{REPLACEMENT CHARACTER}b"]


def test_a_flood_is_cut_and_says_how_much_is_missing():
    flood = Flood(lines_per_s=10, burst=100)
    assert len(flood.admit(["x"] * 1000, now_s=0.0)) == 100
    later = flood.admit(["next"], now_s=1.0)
    assert later == ["[trainyard: 900 lines were not carried; the raw output has them]", "next"]


def test_after_a_flood_lines_pass_at_the_sustained_rate():
    flood = Flood(lines_per_s=10, burst=100)
    flood.admit(["x"] * 100, now_s=0.0)
    assert [line for line in flood.admit(["y"] * 50, now_s=2.0) if line == "y"] == ["y"] * 20


def test_the_total_is_capped():
    flood = Flood(total_bytes=10)
    assert flood.admit(["12345", "12345", "1"], now_s=0.0) == ["12345", "12345"]
    assert flood.mark() == ["[trainyard: 1 lines were not carried; the raw output has them]"]


def test_what_nobody_read_is_named_by_its_size():
    flood = Flood()
    flood.skip(5 << 20)
    assert flood.admit(["after"], 0.0) == [
        "[trainyard: 5 MiB were not carried; the raw output has them]",
        "after",
    ]
