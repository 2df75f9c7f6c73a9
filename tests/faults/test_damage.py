"""One flipped bit in any kind of stored file: reading says so and says where, the rest stays, nothing is made up."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from trainyard.home import token

from tests.checker import Api, differences
from tests.conftest import YardHome, wait_until
from tests.faults.trainer import evidence
from tests.faults.training import Training, endpoint_of

SETTINGS = {
    "TRAINYARD_METRICS_MAX_SEGMENT_BYTES": "300000",  # so that a short job has columns, journals and a manifest
    "TRAINYARD_METRICS_QUIET_S": "3600",
    "TRAINYARD_METRICS_MIN_COMPACTED_BYTES": "1000",
}
KINDS = {
    "journal": "runs/*/journal-*.log",
    "points": "runs/*/points-*.parquet",
    "lines": "runs/*/lines-*.parquet",
    "manifest": "runs/*/manifest.json",
    "pack": "packs/**/*",
}
NAMED = {"pack": r"step-\d+\.bin|model\.bin|train\.py|job\.yaml|evidence\.py"}
"""What a refusal names, when it is not the damaged file: a pack is nothing that a user knows."""
ABSENT = re.compile("missing|no such series|the output is not")
"""What may lack after a repair; all else would be made up."""


@dataclass(frozen=True)
class Ended:
    """A yard that is down, with everything that a job made."""

    home: YardHome
    training: Training


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ended]:
    home = YardHome(tmp_path_factory.mktemp("home"), SETTINGS)
    try:
        home.up()
        training = Training.start(home, tmp_path_factory.mktemp("evidence"))
        wait_until(lambda: all(files(home, kind) for kind in KINDS), "files of every kind")
        training.finish()
        home.down()
        yield Ended(home, training)
    finally:
        home.sweep()


@pytest.fixture
def copy(ended: Ended, tmp_path: Path) -> Iterator[YardHome]:
    """Another home with the same content."""
    home = YardHome(shutil.copytree(ended.home.folder, tmp_path / "home"), SETTINGS)
    yield home
    home.sweep()


def files(home: YardHome, kind: str) -> list[Path]:
    return sorted(path for path in home.folder.glob(KINDS[kind]) if path.is_file() and path.stat().st_size)


def flip_a_bit(path: Path, rng: random.Random) -> int:
    """Returns the offset of the byte."""
    data = bytearray(path.read_bytes())
    offset = rng.randrange(len(data))
    data[offset] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    return offset


def read(home: YardHome, training: Training) -> tuple[list[grpc.RpcError], list[str]]:
    """How reading everything fails, and what is wrong with what is answered."""
    failures: list[grpc.RpcError] = []
    with Api(endpoint_of(home), token(home.folder)) as api:
        for part in (api.records, api.lines, api.checkpoints):
            try:
                part(training.job_id)
            except grpc.RpcError as error:
                failures.append(error)
        if failures:
            return failures, []
        told = evidence.read_diaries(training.folder)
        return [], differences(training.seed, told, api.stored(training.job_id, f"{training.name}-model"))


@pytest.mark.parametrize("seed", [51])
@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_is_told_where_it_is_read_found_by_verify_and_never_a_value(ended, copy, kind, seed):
    path, where = damaged(copy, kind, seed)
    copy.up()
    failures, wrong = read(copy, ended.training)
    assert wrong == [], where
    for failure in failures:
        assert failure.code() is grpc.StatusCode.DATA_LOSS, f"{where}: {failure}"
        assert re.search(NAMED.get(kind, re.escape(path.name)), failure.details()), f"{where}: {failure.details()}"
    verified = copy.run("admin", "verify")
    said = verified.stdout + verified.stderr
    assert verified.returncode == 1, f"{where}: {said}"
    assert path.stem in said, f"{where}: {said}"
    repaired = copy.run("admin", "verify", "--repair")
    assert repaired.returncode in (0, 1), f"{where}: {repaired.stdout + repaired.stderr}"
    assert made_up(copy, ended.training) == [], where
    copy.down()


def made_up(home: YardHome, training: Training) -> list[str]:
    """What is read after a repair and was never written."""
    with Api(endpoint_of(home), token(home.folder)) as api:
        left = api.records(training.job_id)
    found = differences(training.seed, evidence.read_diaries(training.folder), left, over=False)
    return [text for text in found if not ABSENT.search(text)]


def damaged(home: YardHome, kind: str, seed: int) -> tuple[Path, str]:
    """A file of this kind in which one bit was flipped, and words for it."""
    rng = random.Random(f"{kind} {seed}")
    path = rng.choice(files(home, kind))
    offset = flip_a_bit(path, rng)
    return path, f"byte {offset} of {path.relative_to(home.folder)} (seed {seed})"
