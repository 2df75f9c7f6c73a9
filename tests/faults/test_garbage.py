"""Unused chunks are removed while uploads, reads and kills go on: what was committed is never among them."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pytest
from trainyard.client import Client
from trainyard.errors import Conflict, NotFound, NotRunning
from trainyard.home import read_endpoint, token

from scripts.testbed.patience import PATIENCE_S
from tests.conftest import YardHome, wait_until

T = TypeVar("T")

UPLOADERS = 3
VERSIONS = 8
BLOCK_BYTES = 400_000
KILLS = 2
GRACE = {
    "TRAINYARD_ARTIFACTS_CHUNK_GRACE_S": "0.3",
    "TRAINYARD_ARTIFACTS_ORPHAN_GRACE_S": "2",
    "TRAINYARD_ARTIFACTS_COLLECT_INTERVAL_S": "0.1",
}
"""So short that chunks are removed while an upload is under way; then it is refused or repeated, never half there."""


@dataclass
class Uploader:
    """Commits trees that share blocks with those of others, deletes some, and remembers what it was told is there."""

    yard: YardHome
    folder: Path
    name: str
    rng: random.Random
    known: dict[str, dict[str, bytes]] = field(default_factory=dict)
    committed: int = 0
    failure: BaseException | None = None

    def run(self) -> None:
        try:
            for number in range(VERSIONS):
                self._commit(number)
                if self.rng.random() < 0.4:
                    self._delete(self.rng.choice(list(self.known)))
        except BaseException as error:
            self.failure = error

    def _commit(self, number: int) -> None:
        root = self.folder / f"{self.name}-{number}"
        root.mkdir(parents=True)
        files = {f"{index}.bin": block(self.rng.randrange(12)) for index in range(self.rng.randint(1, 4))}
        for path, data in files.items():
            (root / path).write_bytes(data)
        self.known[self._insist(lambda client: client.upload(root, self.name).id)] = files
        self.committed += 1

    def _delete(self, version: str) -> None:
        del self.known[version]
        try:
            self._insist(lambda client: client.delete_version(version))
        except NotFound:
            return  # the answer to the first try was lost with the yard

    def _insist(self, action: Callable[[Client], T]) -> T:
        """Until there is an answer: the yard may be killed, and a collection may outrun an upload, which is told."""
        while True:
            yard = wait_until(lambda: read_endpoint(self.yard.folder), "a yard")
            try:
                with Client(yard.endpoint, token=token(self.yard.folder)) as client:
                    return action(client)
            except NotRunning:
                continue
            except Conflict as error:
                assert error.reason == "ChunkMissing", error


def block(number: int) -> bytes:
    """One of few blocks: trees share them."""
    return random.Random(number).randbytes(BLOCK_BYTES)


def assert_intact(client: Client, uploaders: list[Uploader], target: Path) -> None:
    """Every version that was acknowledged has its bytes, and every other one that is there has some of the blocks."""
    blocks = {block(number) for number in range(12)}
    for uploader in uploaders:
        versions = {version.id for version in client.versions(uploader.name)}
        assert uploader.known.keys() <= versions, "a version that was acknowledged is gone"
        for version in versions:
            client.download(version, target / version)
            found = {path.name: path.read_bytes() for path in (target / version).iterdir()}
            assert set(found.values()) <= blocks
            assert found == uploader.known.get(version, found)


@pytest.mark.parametrize("seed", [41])
def test_garbage_collection_never_takes_what_an_upload_commits(make_home, tmp_path, seed):
    rng = random.Random(seed)
    yard = make_home(**GRACE)
    yard.up()
    uploaders = [
        Uploader(yard, tmp_path, f"tree-{number}", random.Random(seed + number)) for number in range(UPLOADERS)
    ]
    threads = [threading.Thread(target=uploader.run) for uploader in uploaders]
    for thread in threads:
        thread.start()
    for _ in range(KILLS):
        goal = sum(uploader.committed for uploader in uploaders) + rng.randint(1, 3)
        wait_until(lambda goal=goal: sum(each.committed for each in uploaders) >= goal, "further commits")
        yard.kill()
        yard.up()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert [uploader.failure for uploader in uploaders] == [None] * UPLOADERS, f"seed {seed}"
    with yard.client() as client:
        assert_intact(client, uploaders, tmp_path / "downloads")
    verified = yard.run("admin", "verify")
    assert verified.returncode == 0, verified.stdout + verified.stderr
    yard.down()
