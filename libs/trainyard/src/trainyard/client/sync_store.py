"""Calls about artifacts for ordinary code; each does what the method of that name does in `ArtifactCalls`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trainyard_protos.v1 import artifacts_pb2 as pb

from trainyard.client.aio import AsyncClient
from trainyard.client.loop import Loop


class ArtifactMethods:
    """Artifacts of the workspace. A reference is "name", "name@alias", "name@3" or the id of a version."""

    _loop: Loop
    _client: AsyncClient

    def artifacts(self, *, kind: str = "", job: str = "") -> Sequence[pb.ListArtifactsResponse.Artifact]:
        """All artifacts, each with its newest version."""
        return self._loop.run(self._client.artifacts(kind=kind, job=job))

    def versions(self, name: str = "", *, kind: str = "", job: str = "") -> Iterator[pb.Version]:
        """Versions of artifacts, newest first."""
        return self._loop.iterate(self._client.versions(name, kind=kind, job=job))

    def artifact(self, reference: str) -> pb.Version:
        """A version, without its files."""
        return self._loop.run(self._client.artifact(reference))

    def list_files(self, reference: str, *, prefix: str = "") -> Iterator[pb.File]:
        """Files of a version, by path."""
        return self._loop.iterate(self._client.list_files(reference, prefix=prefix))

    def stream_file(self, reference: str, path: str, *, offset: int = 0, length: int = 0) -> Iterator[bytes]:
        """The bytes of one file of a version, verified, as they come."""
        return self._loop.iterate(self._client.stream_file(reference, path, offset=offset, length=length))

    def read_file(self, reference: str, path: str, *, offset: int = 0, length: int = 0) -> bytes:
        """The bytes of one file of a version, in memory."""
        return self._loop.run(self._client.read_file(reference, path, offset=offset, length=length))

    def upload(self, path: Path | str, name: str, **options: Any) -> pb.Version:
        """Stores a file or a folder as a new version; options are those of `AsyncClient.upload`."""
        return self._loop.run(self._client.upload(path, name, **options))

    def download(self, reference: str, target: Path | str, *, sync: bool = False) -> pb.Version:
        """Writes a version's files under `target`, each verified; see `AsyncClient.download`."""
        return self._loop.run(self._client.download(reference, target, sync=sync))

    def set_alias(self, reference: str, alias: str) -> pb.Version:
        """Moves an alias to a version."""
        return self._loop.run(self._client.set_alias(reference, alias))

    def delete_version(self, reference: str) -> None:
        """Deletes a version; lineage still names it."""
        self._loop.run(self._client.delete_version(reference))

    def lineage(self, reference: str = "", *, job: str = "") -> pb.Lineage:
        """What a version was made from and by which job, and who used it; or what a job used and made."""
        return self._loop.run(self._client.lineage(reference, job=job))

    def retention(self, name: str) -> pb.Retention:
        """Which versions of an artifact are kept."""
        return self._loop.run(self._client.retention(name))

    def set_retention(self, name: str, **rules: Any) -> pb.Retention:
        """Says which versions of an artifact are kept; rules are those of `AsyncClient.set_retention`."""
        return self._loop.run(self._client.set_retention(name, **rules))
