"""A run can be read by the description of its files alone, without the ingestor's code."""

import json
import struct
import zlib

import pyarrow.parquet as pq
from hypothesis import given, settings
from trainyard_protos.v1.metrics_pb2 import AppendRequest

from services.metrics.tests.metrics_kit import run_id
from services.metrics.tests.storage_kit import Player, actions, everything


def read_manifest(folder):
    path = folder / "manifest.json"
    if not path.exists():
        return {"first_segment": 0, "files": [], "positions": {}}
    body, crc = path.read_bytes().splitlines()
    assert crc == b"%08x" % zlib.crc32(body)
    return json.loads(body)


def read_columns(folder, file):
    content = (folder / file["name"]).read_bytes()
    assert len(content) == file["size"]
    rest = content[:4]
    assert rest == b"PAR1"
    for part in [*file["groups"], file["footer"]]:
        found = content[part["offset"] : part["offset"] + part["length"]]
        assert zlib.crc32(found) == part["crc"]
        rest += found
    assert rest == content
    return pq.read_table(folder / file["name"]).to_pylist()


def read_journal(path):
    content, offset = path.read_bytes(), 8
    assert content[:8] == b"TYRECS2\n"
    while offset < len(content):
        length, crc, check = struct.unpack_from("<III", content, offset)
        assert zlib.crc32(content[offset : offset + 8]) == check
        payload = content[offset + 12 : offset + 12 + length]
        assert zlib.crc32(payload) == crc
        offset += 12 + length
        while payload:
            (size,) = struct.unpack_from("<I", payload)
            yield AppendRequest.FromString(payload[4 : 4 + size])
            payload = payload[4 + size :]


def points_of(request):
    for block in request.rows.blocks:
        k, n = len(block.step) // 8, len(block.names)
        row = struct.unpack(f"<{k}I", block.row) if block.row else range(k)
        step = struct.unpack(f"<{k}q", block.step)
        time_ns = struct.unpack(f"<{k}q", block.time_ns)
        for index in range(k):
            for column in range(n):
                value = block.value[8 * (column * k + index) :][:8]
                number = request.first_seq + row[index]
                yield (
                    block.names[column],
                    request.rows.rank,
                    request.writer_id,
                    number,
                    step[index],
                    time_ns[index],
                    value,
                )


def read(folder):
    """Points, and lines as (time, writer, number, text), of a run."""
    manifest = read_manifest(folder)
    points, lines = [], []
    for file in manifest["files"]:
        for row in read_columns(folder, file):
            if file["kind"] == "points":
                points.append((*list(row.values())[:6], struct.pack("<d", row["value"])))
            else:
                lines.append((row["time_ns"], row["writer"], row["seq"], row["text"]))
    for path in sorted(folder.glob("journal-*.log")):
        if int(path.stem.removeprefix("journal-")) >= manifest["first_segment"]:
            for request in read_journal(path):
                points += points_of(request)
                lines += ((line.time_ns, request.writer_id, line.seq, line.text) for line in request.lines.lines)
    return sorted(points), sorted(lines)


@settings(max_examples=40, deadline=None)
@given(script=actions)
def test_a_run_is_what_its_description_says(tmp_path_factory, script):
    player = Player(tmp_path_factory.mktemp("runs"))
    for action in script:
        player.play(action)
    snapshot = player.states[0].snapshot(run_id(1))
    points, lines = read(player.folders[0].path)
    assert points == everything(snapshot.points())
    assert [(time, seq, text) for time, _, seq, text in lines] == [
        (line.time_ns, line.seq, line.text) for line in snapshot.lines()
    ]
    player.close()
