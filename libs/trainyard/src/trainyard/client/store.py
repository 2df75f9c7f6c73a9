"""Calls about artifacts: named, immutable trees of files."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from trainyard_protos.v1 import artifacts_pb2 as pb

from trainyard.client.jobs import JobCalls


class ArtifactCalls(JobCalls):
    """Artifacts of the workspace. A reference is "name", "name@alias", "name@3" or the id of a version."""

    async def artifacts(self, *, kind: str = "", job: str = "") -> Sequence[pb.ListArtifactsResponse.Artifact]:
        """All artifacts, each with its newest version; those of one kind or of one job when given."""
        request = pb.ListArtifactsRequest(workspace=self.workspace, kind=kind, job_id=job and await self.job_id(job))
        return (await self._connection.call(self._connection.artifacts.ListArtifacts, request)).artifacts

    async def versions(self, name: str = "", *, kind: str = "", job: str = "") -> AsyncIterator[pb.Version]:
        """Versions, newest first."""
        request = pb.ListVersionsRequest(
            workspace=self.workspace, name=name, kind=kind, job_id=job and await self.job_id(job), page_size=500
        )
        while True:
            page = await self._connection.call(self._connection.artifacts.ListVersions, request)
            for version in page.versions:
                yield version
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    async def artifact(self, reference: str) -> pb.VersionDetail:
        """A version with its files.

        Raises:
            NotFound: there is no such version.
        """
        request = pb.GetVersionRequest(workspace=self.workspace, reference=reference)
        return await self._connection.call(self._connection.artifacts.GetVersion, request)

    async def upload(
        self,
        path: Path | str,
        name: str,
        *,
        kind: str = "data",
        aliases: Sequence[str] = (),
        labels: Mapping[str, str] | None = None,
    ) -> pb.Version:
        """Stores a file or a folder as a new version of `name`; only chunks that the yard lacks are sent."""
        from trainyard.client.transfer import upload

        return await upload(
            self._connection, Path(path), self.workspace, name, kind=kind, aliases=aliases, labels=labels or {}
        )

    async def download(self, reference: str, target: Path | str) -> pb.Version:
        """Writes a version's files under `target`, each verified.

        Raises:
            NotFound: there is no such version.
            Defect: a stored chunk is damaged (reason DataLoss); nothing is left in `target`.
        """
        from trainyard.client.transfer import download

        return await download(self._connection, reference, Path(target), self.workspace)
