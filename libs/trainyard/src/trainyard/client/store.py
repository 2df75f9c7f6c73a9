"""Calls about artifacts: named, immutable trees of files."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainyard_protos.v1 import artifacts_pb2 as pb

from trainyard.client.jobs import JobCalls

if TYPE_CHECKING:
    from trainyard.artifacts import Progress


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

    async def artifact(self, reference: str) -> pb.Version:
        """A version, without its files.

        Raises:
            NotFound: there is no such version.
        """
        request = pb.GetVersionRequest(workspace=self.workspace, reference=reference, without_manifest=True)
        return (await self._connection.call(self._connection.artifacts.GetVersion, request)).version

    async def list_files(self, reference: str, *, prefix: str = "") -> AsyncIterator[pb.File]:
        """Files of a version, by path; those whose path begins with `prefix`.

        Raises:
            NotFound: there is no such version.
        """
        from trainyard.client.transfer import list_files

        async for file in list_files(self._connection, reference, self.workspace, prefix):
            yield file

    async def stream_file(self, reference: str, path: str, *, offset: int = 0, length: int = 0) -> AsyncIterator[bytes]:
        """The bytes of one file of a version, verified, as they come, without fetching the rest of it.

        Args:
            offset: of the first byte wanted.
            length: in bytes; 0: to the end of the file.

        Raises:
            NotFound: there is no such version or file.
            Defect: a stored chunk is damaged (reason ChunkDamaged).
        """
        from trainyard.client.transfer import read_file

        async for content in read_file(self._connection, reference, path, self.workspace, offset, length):
            yield content

    async def read_file(self, reference: str, path: str, *, offset: int = 0, length: int = 0) -> bytes:
        """The bytes of one file of a version, in memory; else as `stream_file`."""
        pieces = [piece async for piece in self.stream_file(reference, path, offset=offset, length=length)]
        return b"".join(pieces)

    async def upload(
        self,
        path: Path | str,
        name: str,
        *,
        kind: str = "data",
        aliases: Sequence[str] = (),
        labels: Mapping[str, str] | None = None,
        inputs: Sequence[str] = (),
        metrics: Mapping[str, float] | None = None,
        progress: Progress | None = None,
    ) -> pb.Version:
        """Stores a file or a folder as a new version of `name`; only chunks that the yard lacks are sent.

        An upload that was interrupted goes on where it was: call it again.

        Args:
            kind: "data", "output" or "code".
            aliases: names that move to the new version, beside "latest".
            inputs: references of versions that it was made from.
            metrics: what retention by the best one looks at.
            progress: told how many more bytes are stored, as they are.

        Raises:
            InvalidArgument: something in the folder cannot be stored, is not readable, or changed meanwhile.
            Exhausted: the yard's disk is full.
        """
        from trainyard.client.transfer import unseen, upload

        made_from = [(await self.artifact(reference)).id for reference in inputs]
        return await upload(
            self._connection,
            Path(path),
            self.workspace,
            name,
            kind=kind,
            aliases=aliases,
            labels=labels or {},
            inputs=made_from,
            metrics=metrics or {},
            progress=progress or unseen,
        )

    async def download(
        self, reference: str, target: Path | str, *, sync: bool = False, progress: Progress | None = None
    ) -> pb.Version:
        """Writes a version's files to the folder `target`, each byte verified.

        A download that was interrupted goes on where it was: call it again.

        Args:
            target: new or empty. It appears when it is whole.
            sync: `target` may hold files: those that differ from the version's are replaced, what is equal is not
                fetched, others stay.
            progress: told how many more bytes are there.

        Raises:
            NotFound: there is no such version.
            InvalidArgument: something is in the way; nothing was changed.
            Conflict: another download into `target` is running, or the disk here is full.
            Defect: a stored chunk is damaged (reason ChunkDamaged); nothing was changed.
        """
        from trainyard.client.transfer import download, unseen

        return await download(
            self._connection, reference, Path(target), self.workspace, sync=sync, progress=progress or unseen
        )

    async def set_alias(self, reference: str, alias: str) -> pb.Version:
        """Moves an alias to a version; the versions that aliases other than "latest" point to are kept.

        Raises:
            NotFound: there is no such version.
            InvalidArgument: this cannot be an alias.
        """
        request = pb.SetAliasRequest(workspace=self.workspace, reference=reference, alias=alias)
        return await self._connection.call(self._connection.artifacts.SetAlias, request)

    async def delete_version(self, reference: str) -> None:
        """Deletes a version; lineage still names it.

        Raises:
            NotFound: there is no such version.
        """
        request = pb.DeleteVersionRequest(workspace=self.workspace, reference=reference)
        await self._connection.call(self._connection.artifacts.DeleteVersion, request)

    async def lineage(self, reference: str = "", *, job: str = "") -> pb.Lineage:
        """What a version was made from and by which job, and who used it; or what a job used and made.

        Raises:
            NotFound: there is no such version or job.
        """
        request = pb.GetLineageRequest(workspace=self.workspace)
        if job:
            request.job_id = await self.job_id(job)
        else:
            request.reference = reference
        return await self._connection.call(self._connection.artifacts.GetLineage, request)

    async def retention(self, name: str) -> pb.Retention:
        """Which versions of an artifact are kept; all of them, when no rule is set."""
        request = pb.GetRetentionRequest(workspace=self.workspace, name=name)
        return await self._connection.call(self._connection.artifacts.GetRetention, request)

    async def set_retention(
        self,
        name: str,
        *,
        keep_last: int = 0,
        keep_best: int = 0,
        best_metric: str = "",
        best_mode: str = "",
        ttl_s: float = 0,
    ) -> pb.Retention:
        """Says which versions of an artifact are kept: those that any of these rules keeps; without one, all.

        Args:
            keep_last: the newest ones.
            keep_best: the best ones by `best_metric`.
            best_mode: "min" or "max".
            ttl_s: those younger than this, in seconds.

        Raises:
            InvalidArgument: the rules contradict each other.
        """
        rules = pb.Retention(
            name=name,
            keep_last=keep_last,
            keep_best=keep_best,
            best_metric=best_metric,
            best_mode=best_mode,
            ttl_s=ttl_s,
        )
        request = pb.SetRetentionRequest(workspace=self.workspace, retention=rules)
        return await self._connection.call(self._connection.artifacts.SetRetention, request)
