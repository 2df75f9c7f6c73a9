"""Counting the fields of a message on its encoded bytes."""

import contextlib

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from servicekit.wire import Malformed, has_more_fields, shape_of
from trainyard_protos.v1 import artifacts_pb2 as pb

SHAPE = shape_of(pb.CommitRequest.DESCRIPTOR)


@st.composite
def commits(draw):
    """Few draws for a message with many fields: hypothesis takes its time for each."""
    chunks = [draw(st.integers(0, 5)) for _ in range(draw(st.integers(0, 5)))]  # of each file
    number = draw(st.integers(0, 2**63 - 1))
    text = draw(st.sampled_from(["", "x", "x" * 127, "x" * 128, "x" * 300]))  # with lengths of one byte and of two
    chunk = pb.ChunkRef(hash=text.encode(), size=number % 2**32)
    return pb.CommitRequest(
        name=text,
        manifest=pb.Manifest(files=[pb.File(path=text, size=-number, chunks=[chunk] * count) for count in chunks]),
        aliases=[text] * draw(st.integers(0, 5)),
        metrics={str(index): float(number) for index in range(draw(st.integers(0, 3)))},
    )


def fields_of(message):
    """Counted by walking the parsed message."""
    count = 0
    for field, value in message.ListFields():
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        if is_map:
            count += 3 * len(value)  # an entry, its key and its value
            continue
        for each in value if field.is_repeated else [value]:
            count += 1 + (fields_of(each) if field.message_type is not None else 0)
    return count


@settings(max_examples=40)
@given(commits())
def test_all_fields_of_all_nested_messages_count(commit):
    raw, count = commit.SerializeToString(), fields_of(commit)
    assert not has_more_fields(raw, SHAPE, count)
    if count:
        assert has_more_fields(raw, SHAPE, count - 1)


@settings(max_examples=40)
@given(st.binary(max_size=60), st.integers(0, 30))
def test_whatever_the_parser_takes_is_counted(raw, limit):
    try:
        count = fields_of(pb.CommitRequest.FromString(raw))
    except DecodeError:
        return
    with contextlib.suppress(Malformed):  # groups, which no client of ours sends
        assert has_more_fields(raw, SHAPE, limit) or count <= limit


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(b"\x22" + b"\xff" * 30, id="a length without an end"),
        pytest.param(b"\x22\x7f" + b"\x0a\x00" * 5, id="a message cut off"),
        pytest.param(b"\x22\x04\x0a\x7f\x0a\x00" + b"\x0a\x00" * 5, id="a message beyond the one around it"),
        pytest.param(b"\x0b" * 9, id="a group"),
        pytest.param(b"\x0f" * 9, id="a wire type that does not exist"),
    ],
)
def test_what_is_no_message_is_refused(raw):
    with pytest.raises(Malformed):
        has_more_fields(raw, SHAPE, 2)


def test_millions_of_empty_messages_are_counted_up_to_the_limit_only():
    files = b"\x0a\x00" * 1_000_000
    raw = pb.CommitRequest(name=files.decode()).SerializeToString()
    assert not has_more_fields(raw, SHAPE, 1)
    as_manifest = b"\x22" + raw[1:]
    assert has_more_fields(as_manifest, SHAPE, 1000)
