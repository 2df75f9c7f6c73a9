"""Uploads, commits, deletions, collections and crashes in any order: every version always reads back, nothing leaks."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path

from blake3 import blake3
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from prometheus_client import CollectorRegistry
from servicekit.errors import FailedPrecondition, Unavailable
from servicekit.store import Store
from trainyard_artifacts import catalog
from trainyard_artifacts.app import MIGRATIONS
from trainyard_artifacts.chunks import Chunks
from trainyard_artifacts.collector import Collector
from trainyard_artifacts.commits import Commits
from trainyard_artifacts.counters import Counters
from trainyard_artifacts.domain.names import ById
from trainyard_artifacts.folder import FolderObjects
from trainyard_artifacts.sending import Sender
from trainyard_artifacts.settings import Settings
from trainyard_artifacts.trees import Trees
from trainyard_protos.v1 import artifacts_pb2 as pb

CONTENTS = [bytes([number]) * (50 + 700 * number) for number in range(12)]
NOTHING_IS_SPARED = Settings(chunk_grace_s=1e-9, orphan_grace_s=3600, rewrite_below=0.8, put_batch_bytes=8000)

some = st.lists(st.integers(0, len(CONTENTS) - 1), min_size=1, max_size=6, unique=True)


class CrashingObjects(FolderObjects):
    """Objects whose next operations fail: the `crash_in`th one from now, before or after it took effect."""

    crash_in = 0
    after = False

    async def put(self, key, parts):
        await self._perhaps(super().put(key, parts))

    async def delete(self, key):
        await self._perhaps(super().delete(key))

    async def _perhaps(self, operation):
        self.crash_in -= 1
        if self.crash_in == 0 and not self.after:
            operation.close()
            raise Unavailable("crash", reason="Crash")
        await operation
        if self.crash_in == 0:
            raise Unavailable("crash", reason="Crash")


class ArtifactStates(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.loop = asyncio.Runner()
        self.home = Path(tempfile.mkdtemp(prefix="trainyard-states-"))
        self.committed: dict[str, list[int]] = {}
        self.run(self.open())

    def run(self, work):
        return self.loop.run(work)

    async def open(self):
        self.store = Store(f"sqlite:///{self.home}/artifacts.db", migrations=MIGRATIONS, name="artifacts")
        self.objects = CrashingObjects(self.home)
        self.counters = Counters(CollectorRegistry())
        self.chunks = Chunks(self.store, self.objects, NOTHING_IS_SPARED)
        self.commits = Commits(self.store, NOTHING_IS_SPARED)
        self.sender = Sender(self.chunks, self.counters)
        self.collector = Collector(self.store, self.objects, self.chunks, NOTHING_IS_SPARED, self.counters)
        await self.store.open()

    async def close(self):
        await self.store.close()
        await self.objects.close()

    async def put(self, contents):
        await self.chunks.put("default", [(blake3(CONTENTS[n]).digest(), CONTENTS[n]) for n in contents])

    async def commit(self, contents):
        """As a client does: what was collected meanwhile is sent again."""
        files = []
        for index, data in enumerate(CONTENTS[n] for n in contents):
            chunk = pb.ChunkRef(hash=blake3(data).digest(), size=len(data))
            files.append(pb.File(path=f"{index}", size=len(data), chunks=[chunk]))
        request = pb.CommitRequest(workspace="default", name="m", kind="data", manifest=pb.Manifest(files=files))
        while True:
            try:
                version = await self.commits.commit(request)
            except FailedPrecondition as error:
                assert error.reason == "ChunkMissing"
                await self.put(contents)
                continue
            self.committed[version.id] = contents
            return

    async def read(self, id):
        row = await self.store.read(lambda session: catalog.find(session, "default", ById(id)))
        tree = await Trees(self.store).of(row)
        hashes = [chunk.hash for file in tree.files for chunk in file.chunks]
        messages = [message async for message in self.sender.send(row, tree.paths, hashes)]
        return [chunk.data for message in messages for chunk in (message, *message.more)]

    @rule(contents=some)
    def an_upload_that_never_commits(self, contents):
        self.run(self.put(contents))

    @rule(contents=some)
    def an_upload(self, contents):
        self.run(self.put(contents))
        self.run(self.commit(contents))

    @rule(contents=some)
    def an_upload_with_a_collection_before_its_commit(self, contents):
        self.run(self.put(contents))
        self.run(self.collector.collect())
        self.run(self.commit(contents))

    @rule(contents=st.lists(some, min_size=2, max_size=4))
    def uploads_and_collections_at_once(self, contents):
        async def upload(one):
            await self.put(one)
            await self.commit(one)

        async def all_at_once():
            collections = [self.collector.collect() for _ in contents]
            reads = [self.read(id) for id in self.committed]
            await asyncio.gather(*map(upload, contents), *collections, *reads)

        self.run(all_at_once())

    @precondition(lambda self: self.committed)
    @rule(data=st.data())
    def a_deletion(self, data):
        id = data.draw(st.sampled_from(sorted(self.committed)))
        del self.committed[id]
        self.run(self.store.write(lambda session: catalog.remove(session, catalog.find(session, "default", ById(id)))))

    @rule()
    def a_collection(self):
        self.run(self.collector.collect())

    @rule(contents=some, after=st.booleans())
    def a_crash_while_a_pack_is_written(self, contents, after):
        self.crash(self.put(contents), 1, after)

    @rule(at=st.integers(1, 4), after=st.booleans())
    def a_crash_in_a_collection(self, at, after):
        self.crash(self.collector.collect(), at, after)

    def crash(self, work, at, after):
        self.objects.crash_in, self.objects.after = at, after
        try:
            self.run(work)
        except Unavailable as error:
            assert error.reason == "Crash"
        self.restart()

    @rule()
    def restart(self):
        self.run(self.close())
        self.run(self.open())

    @invariant()
    def every_version_reads_back(self):
        for id, contents in self.committed.items():
            assert self.run(self.read(id)) == [CONTENTS[n] for n in contents]

    def teardown(self):
        try:
            self.run(self.nothing_leaks())
        finally:
            self.run(self.close())
            self.loop.close()
            shutil.rmtree(self.home)

    async def nothing_leaks(self):
        for id in self.committed:
            await self.store.write(
                lambda session, id=id: catalog.remove(session, catalog.find(session, "default", ById(id)))
            )
        self.collector.settings = NOTHING_IS_SPARED.model_copy(update={"orphan_grace_s": 1e-9})
        await self.collector.collect()
        assert await self.objects.list("packs/") == []


ArtifactStates.TestCase.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)
test_every_version_always_reads_back_and_nothing_leaks = ArtifactStates.TestCase
