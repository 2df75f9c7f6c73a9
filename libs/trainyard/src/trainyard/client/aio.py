"""The asynchronous client."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Self

from trainyard_protos.v1 import scheduler_pb2, yard_pb2

from trainyard import errors, home
from trainyard.client.attachment import Attachment
from trainyard.client.connection import CALL_DEADLINE_S, Connection, find, here
from trainyard.client.documents import Source
from trainyard.client.follow import FollowCalls
from trainyard.client.handles import AsyncJobHandle
from trainyard.client.removal import RemovalCalls
from trainyard.client.search import SearchCalls
from trainyard.client.store import ArtifactCalls


class AsyncClient(FollowCalls, SearchCalls, RemovalCalls, ArtifactCalls):
    """A yard, for asyncio code. Made and used inside one event loop; `async with` closes it.

    Args:
        endpoint: `host:port`; default: `TRAINYARD_ENDPOINT`, else the yard of this machine.
        token: default: `TRAINYARD_TOKEN`, else the token file of this machine's yard.
        ca_file: root certificate (PEM), needed beyond loopback; default: `TRAINYARD_CA_FILE`.
        workspace: everything is asked for and made in this workspace.

    Raises:
        NotRunning: no yard is named and none runs on this machine.
        Refused: there is no token.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        token: str | None = None,
        ca_file: Path | None = None,
        workspace: str = "default",
    ) -> None:
        self._connection = Connection(find(endpoint, token, ca_file))
        self.workspace = workspace

    @classmethod
    def of_this_machine(cls, *, reading: bool = False) -> Self:
        """A client of the yard that serves `TRAINYARD_HOME`, whatever context and environment say.

        Args:
            reading: of the one that only reads, which commands share while no yard is up.

        Raises:
            NotRunning: none does.
            Refused: there is no token.
        """
        client = cls.__new__(cls)
        client._connection = Connection(here(home.home(), reading=reading))
        client.workspace = "default"
        return client

    async def submit(
        self, source: Source, *, idempotency_key: str = "", owner: scheduler_pb2.Owner | None = None
    ) -> AsyncJobHandle:
        """Submits a job: the path of a file, its text, a mapping or a `TrainingJob`.

        The same `idempotency_key` always gives the same job.

        Raises:
            InvalidSpec: the document is wrong; nothing was created. All its problems are in `problems`.
            NotRunning: the yard cannot be reached.
        """
        answer = await self.submit_document(source, idempotency_key=idempotency_key, owner=owner)
        return AsyncJobHandle(self, answer.job.id, answer.job.name)

    async def submit_batch(self, sources: Iterable[Source]) -> list[AsyncJobHandle | errors.YardError]:
        """Submits many jobs; each succeeds or fails on its own, and answers come in the order of `sources`."""
        return [
            answer if isinstance(answer, errors.YardError) else AsyncJobHandle(self, answer.job.id, answer.job.name)
            async for answer in self.submit_documents(sources)
        ]

    async def job(self, job: str) -> AsyncJobHandle:
        """A handle of a job, by any reference (see `JobCalls`).

        Raises:
            NotFound: no job matches.
            Conflict: several jobs match.
        """
        found = await self.get(job)
        return AsyncJobHandle(self, found.id, found.name)

    @property
    def ephemeral(self) -> bool:
        """Whether the yard runs on this machine and ends when no client is attached and no job is active."""
        return self._connection.target.ephemeral

    @property
    def read_only(self) -> bool:
        """Whether no yard is up, and what is stored is only read."""
        return self._connection.target.read_only

    async def attach(self) -> Attachment:
        """Keeps an ephemeral yard up until this process ends or the attachment is released."""
        attachment = Attachment(self._connection.yard.Attach(), self.workspace)
        await attachment.hold()
        return attachment

    async def info(self) -> yard_pb2.InfoResponse:
        """What runs behind this endpoint."""
        return await self._connection.call(self._connection.yard.Info, yard_pb2.InfoRequest())

    async def shutdown(self, *, stop_jobs: bool, timeout_s: float = 60.0) -> yard_pb2.ShutdownResponse:
        """Ends the yard of this machine; with `stop_jobs`, cancels what runs first, within `timeout_s` seconds."""
        request = yard_pb2.ShutdownRequest(stop_jobs=stop_jobs, timeout_s=timeout_s)
        return await self._connection.call(self._connection.yard.Shutdown, request, timeout_s + CALL_DEADLINE_S)

    async def close(self) -> None:
        """Closes the connection."""
        await self._connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
