"""The tracker's log is what `docs/reference/storage-formats.md` says: a reader made from that page alone."""

import json
import math
import struct
import uuid
import zlib

from trainyard.tracker import records
from trainyard.tracker.session import Session

CONTINUED_FROM = 0x2144DF1C


def read_segment(content):
    """Header fields and records (kind, shape number, payload) of one segment."""
    header = struct.unpack_from("<8s16siIQqQQQ", content)
    assert header[0] == b"TYLOG\0\0\2"
    found, at = [], 96
    while size := struct.unpack_from("<I", content, at)[0]:
        record = content[at : at + size]
        assert size % 8 == 0
        assert zlib.crc32(record[:-4], CONTINUED_FROM) == struct.unpack("<I", record[-4:])[0]
        tag = struct.unpack_from("<I", record, 4)[0]
        found.append((tag >> 24, tag & 0xFFFFFF, record[8:-4]))
        at += size
    assert zlib.crc32(content[96:at], CONTINUED_FROM) == CONTINUED_FROM
    return header, found


def test_a_log_can_be_read_by_its_description_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINYARD_TRACKER_DIR", str(tmp_path))
    monkeypatch.setenv("RANK", "4")
    monkeypatch.setattr(records, "FIRST_SIZE", 4096)
    session = Session()
    session.facts("params", lambda: {"lr": 0.5})
    for step in range(500):
        session.log({"loss": step / 2, "acc": math.inf} if step % 2 else {"loss": step / 2}, step=step)
    session.progress(500, 1_000)
    session.finish()

    rows, rest, number = [], [], 0
    for index, path in enumerate(sorted(tmp_path.iterdir())):
        (_, writer, rank, _, _, _, in_header, first_row, dropped), found = read_segment(path.read_bytes())
        assert (path.name, rank, in_header) == (f"{uuid.UUID(bytes=writer)}.{index:06d}.log", 4, index)
        assert (first_row, dropped) == (number, 0)
        shapes = {}
        for kind, shape, payload in found:
            if kind == 1:
                shapes[shape] = json.loads(payload)
            elif kind == 0:
                names = shapes[shape]
                step, _, *values = struct.unpack_from(f"<qq{len(names)}d", payload)
                rows.append((step, dict(zip(names, values, strict=True))))
                number += 1
            else:
                rest.append((kind, payload))
    assert rows == [
        (step, {"loss": step / 2, "acc": math.inf} if step % 2 else {"loss": step / 2}) for step in range(500)
    ]
    assert [kind for kind, _ in rest] == [3, 2]
    assert json.loads(rest[0][1]) == {"params": {"lr": 0.5}}
    assert struct.unpack_from("<qq", rest[1][1]) == (500, 1_000)
