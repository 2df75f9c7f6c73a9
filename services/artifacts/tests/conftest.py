"""A real artifact store behind a real server, on a free port, in a folder of the test's own."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry
from servicekit import server as servers
from servicekit.auth import AttemptTokens, Authenticator, bearer_token
from trainyard.channel import connect
from trainyard_artifacts.app import Artifacts
from trainyard_protos.v1.artifacts_pb2_grpc import ArtifactServiceStub


class Yard:
    """The store of one home, which can be stopped and started again, and its callers."""

    def __init__(self, home):
        self.home = home
        self.tokens = AttemptTokens.load_or_create(home)
        self._channels = []

    async def start(self):
        self.app = Artifacts(home=self.home, database_url=f"sqlite:///{self.home}/artifacts.db")
        authenticator = Authenticator(bearer_token(self.home), self.tokens)
        self._server = servers.build(authenticator, CollectorRegistry())
        self.app.register(self._server)
        self._port = servers.listen(self._server, "127.0.0.1", 0)
        await self.app.start()
        await self._server.start()

    async def stop(self):
        for channel in self._channels:
            await channel.close()
        self._channels.clear()
        await self._server.stop(None)
        await self.app.stop()

    def user(self):
        return self._stub(bearer_token(self.home))

    def attempt(self, *, job="job-1", fence=1, workspace="default"):
        token, _ = self.tokens.mint(workspace, job, f"{job}-{fence}", fence, 60)
        return self._stub(token)

    def _stub(self, token):
        channel = connect(f"127.0.0.1:{self._port}", token)
        self._channels.append(channel)
        return ArtifactServiceStub(channel)

    def chunk_files(self, workspace="default"):
        return sorted(path for path in (self.home / "chunks" / workspace).glob("??/*") if len(path.name) == 64)


@pytest.fixture
async def yard(tmp_path):
    yard = Yard(tmp_path / "home")
    await yard.start()
    yield yard
    await yard.stop()


@pytest.fixture
def tree(tmp_path):
    """Makes a folder of files: `tree({"a/b.txt": b"..."})`."""
    made = 0

    def make(files):
        nonlocal made
        made += 1
        root = tmp_path / f"tree-{made}"
        root.mkdir()
        for name, content in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(content)
        return root

    return make
