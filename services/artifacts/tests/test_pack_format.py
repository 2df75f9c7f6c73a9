"""The format of packs, and that a version can be read with nothing but what is written about it."""

import sqlite3
import struct
import zlib

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from trainyard.artifacts import upload
from trainyard_artifacts.domain.pack import TRAILER_BYTES, BadPack, build, read_table, table_place

from services.artifacts.tests.store_kit import Yard, noise

blobs = st.lists(st.binary(min_size=1, max_size=200), max_size=20)


def packed(contents):
    return b"".join(build((blake3(data).digest(), data) for data in contents).parts)


def table_of(pack):
    trailer = pack[-TRAILER_BYTES:]
    offset, size = table_place(len(pack), trailer)
    return read_table(pack[offset : offset + size], trailer)


@given(blobs)
def test_a_pack_tells_where_each_chunk_is(contents):
    pack = packed(contents)
    entries = table_of(pack)
    assert [pack[entry.offset : entry.offset + entry.size] for entry in entries] == contents
    assert [entry.hash for entry in entries] == [blake3(data).digest() for data in contents]
    assert build((e.hash, b"x" * e.size) for e in entries).size == len(pack)


@given(blobs, st.data())
def test_no_bit_of_a_table_can_flip_unseen(contents, data):
    pack = bytearray(packed(contents))
    start, _ = table_place(len(pack), bytes(pack[-TRAILER_BYTES:]))
    bit = data.draw(st.integers(start * 8, len(pack) * 8 - 1))
    pack[bit // 8] ^= 1 << bit % 8
    with pytest.raises(BadPack):
        table_of(bytes(pack))


@given(blobs, st.data())
def test_a_pack_that_is_not_whole_is_seen(contents, data):
    pack = packed(contents)
    with pytest.raises(BadPack):
        table_of(pack[: data.draw(st.integers(0, len(pack) - 1))])


def fields(message):
    """Field numbers and values of an encoded protobuf message: only what manifests need of the encoding."""
    at = 0

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(message):
        tag = varint()
        if tag & 7 == 0:
            yield tag >> 3, varint()
        else:
            assert tag & 7 == 2
            size = varint()
            yield tag >> 3, message[at : at + size]
            at += size


def read_version(home, name):
    """Files of the newest version, read from the database and the packs alone."""
    database = sqlite3.connect(home / "artifacts.db")
    id, workspace, digest = database.execute(
        "SELECT v.id, v.workspace, v.digest FROM artifact_version v JOIN artifact_alias a ON a.version_id = v.id "
        "WHERE a.name = ? AND a.alias = 'latest'",
        (name,),
    ).fetchone()
    (manifest,) = database.execute("SELECT content FROM artifact_manifest WHERE version_id = ?", (id,)).fetchone()
    database.close()
    assert blake3(manifest).digest() == digest
    where = dict(chunks_of_packs(home / "packs" / workspace))
    files = {}
    for _, file in fields(manifest):
        path, chunks = "", []
        for number, value in fields(file):
            if number == 1:
                path = value.decode()
            elif number == 4:
                chunks.append(dict(fields(value))[1])
        files[path] = b"".join(where[hash] for hash in chunks)
    return files


def chunks_of_packs(folder):
    for path in folder.iterdir():
        pack = path.read_bytes()
        assert pack.startswith(b"TYPACK1\n")
        table, count, crc, end = struct.unpack("<QII8s", pack[-24:])
        assert end == b"TYPACKE\n"
        assert zlib.crc32(pack[table:-24]) == crc
        for hash, offset, size in struct.iter_unpack("<32sQI", pack[table:-24]):
            data = pack[offset : offset + size]
            assert blake3(data).digest() == hash
            yield hash, data
        assert table + 44 * count + 24 == len(pack)


async def test_a_version_is_read_from_files_with_plain_python(tmp_path, tree):
    yard = Yard(tmp_path / "home")
    await yard.start()
    content = {"empty": b"", "big.bin": noise(3_000_000), **{f"d/{n}": noise(500, n) for n in range(50)}}
    await upload(yard.user(), tree(content), workspace="default", name="m", kind="data")
    await yard.stop()
    assert read_version(tmp_path / "home", "m") == content
