"""Eight processes of a peer that write into one place, and what is there afterwards."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import tempfile
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from _harness import clean_environment

WRITERS = 8
NAMES = 10
SCRIPT = Path(__file__).with_name("_tracker_peer.py")


@dataclass(frozen=True, slots=True)
class PeerIngest:
    """Points handed over to a peer, those it stored, the time of the slowest process with its `finish`, and the longest
    call of its `log`."""

    handed_over: int
    stored: int
    seconds: float
    longest_call_s: float

    @property
    def points_per_s(self) -> float:
        return self.stored / self.seconds


def ingest_peer(python: Path, name: str, seconds: float, folder: Path) -> PeerIngest:
    """All processes begin together, once each is ready; the place exists before, which some peers need."""
    place = tempfile.mkdtemp(prefix=f"{name}-", dir=folder)
    env = clean_environment(TRACKIO_DIR=place)
    subprocess.run(
        [python, SCRIPT, name, "calls", "1", "99"], env=env, cwd=place, check=True, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    before = _stored(name, Path(place))
    writers = [
        subprocess.Popen(
            [python, SCRIPT, name, "write", str(seconds), str(number)],
            env=env, cwd=place, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )
        for number in range(WRITERS)
    ]  # fmt: skip
    for writer in writers:
        assert writer.stdout is not None
        writer.stdout.readline()
    answers = [json.loads(output) for output in _begin(writers)]
    return PeerIngest(
        handed_over=sum(answer["points"] for answer in answers),
        stored=_stored(name, Path(place)) - before,
        seconds=max(answer["seconds"] for answer in answers),
        longest_call_s=max(answer["longest_call_s"] for answer in answers),
    )


def _begin(writers: list[subprocess.Popen[str]]) -> list[str]:
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("\n")
        writer.stdin.flush()
    return [writer.communicate()[0] for writer in writers]


def _stored(name: str, place: Path) -> int:
    """Points in the peer's database."""
    if name == "trackio":
        [database] = [path for path in place.glob("*.db") if path.stem == "bench"]
        return _count(database, "SELECT COUNT(*) FROM metrics") * NAMES
    return _count(place / "mlflow.db", "SELECT COUNT(*) FROM metrics")


def _count(database: Path, query: str) -> int:
    with closing(sqlite3.connect(database)) as connection:
        return int(connection.execute(query).fetchone()[0])
