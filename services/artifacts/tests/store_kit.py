"""A real artifact store behind a real server, on a free port, in a folder of the test's own, and ways to look at it."""

from __future__ import annotations

import random
from collections import Counter

import grpc
import pytest
from blake3 import blake3
from prometheus_client import CollectorRegistry
from servicekit import server as servers
from servicekit.auth import AttemptTokens, Authenticator, bearer_token
from servicekit.grants import Grants
from sqlalchemy import text
from trainyard.channel import connect
from trainyard_artifacts.app import Artifacts
from trainyard_artifacts.domain.pack import TRAILER_BYTES, read_table, table_place
from trainyard_artifacts.settings import Settings
from trainyard_protos.v1 import artifacts_pb2 as pb
from trainyard_protos.v1.admin_pb2_grpc import ArtifactAdminServiceStub
from trainyard_protos.v1.artifacts_pb2_grpc import ArtifactServiceStub


class Yard:
    """The store of one home, which can be stopped and started again, and its callers."""

    def __init__(self, home, database_url="", **settings):
        self.home = home
        self.database_url = database_url or f"sqlite:///{home}/artifacts.db"
        self.settings = Settings(**settings)
        self.tokens = AttemptTokens.load_or_create(home)
        self._channels = []

    async def start(self):
        self.app = Artifacts(home=self.home, database_url=self.database_url, settings=self.settings)
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

    def admin(self, token=""):
        return ArtifactAdminServiceStub(self._channel(token or bearer_token(self.home)))

    def attempt(self, *, job="job-1", fence=1, workspace="default", outputs=(), inputs=()):
        """An attempt whose job declares these outputs and inputs; with None, its token is of an older version."""
        named = None if inputs is None else Grants.of(write=outputs, read=inputs)
        token, _ = self.tokens.mint(workspace, job, f"{job}-{fence}", fence, 60, named)
        return self._stub(token)

    def _stub(self, token):
        return ArtifactServiceStub(self._channel(token))

    def _channel(self, token):
        channel = connect(f"127.0.0.1:{self._port}", token)
        self._channels.append(channel)
        return channel

    def packs(self, workspace="default"):
        """Files of packs, oldest first."""
        return sorted((self.home / "packs" / workspace).glob("*"))

    def stored(self, workspace="default"):
        """How many times each chunk is stored, by the tables of the packs."""
        return Counter(entry.hash for path in self.packs(workspace) for entry in entries_of(path))

    async def sql(self, statement, **values):
        """Changes the database behind the service's back."""
        await self.app.store.write(lambda session: session.execute(text(statement), values))

    async def age(self, hours=2.0):
        """Makes chunks look as if nobody had asked for them for a while."""
        await self.sql("UPDATE artifact_chunk SET touched_ns = touched_ns - :ns", ns=int(hours * 3600e9))


def entries_of(path):
    """What a pack's table says is in it."""
    data = path.read_bytes()
    trailer = data[-TRAILER_BYTES:]
    offset, size = table_place(len(data), trailer)
    return read_table(data[offset : offset + size], trailer)


def flip(path, at, bit=4):
    """Damages one byte of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= bit
    path.write_bytes(data)


def contents(root):
    """Bytes of every file below a folder, by path."""
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def noise(size, seed=0):
    """Bytes that do not repeat."""
    return random.Random(seed).randbytes(size)


async def refused(call):
    """The error that a call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def put(stub, *contents, workspace="default"):
    """Sends chunks in one call."""

    async def messages():
        for data in contents:
            yield pb.Chunk(workspace=workspace, hash=blake3(data).digest(), data=data)

    return await stub.PutChunks(messages())


def s3_settings(bucket):
    """Settings for a store in this bucket."""
    return {
        "s3_bucket": bucket.name,
        "s3_endpoint": bucket.endpoint,
        "s3_region": bucket.region,
        "s3_access_key_id": bucket.access_key,
        "s3_secret_access_key": bucket.secret_key,
    }
