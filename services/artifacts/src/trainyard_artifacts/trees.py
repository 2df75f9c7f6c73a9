"""Manifests of the versions read last, so that a stream of reads parses each once."""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections import OrderedDict
from dataclasses import dataclass

from servicekit.store import Store
from trainyard_protos.v1 import artifacts_pb2 as pb

from trainyard_artifacts import catalog
from trainyard_artifacts.tables import VersionRow

_REMEMBERED_CHUNKS = 200_000  # over all of them; about 50 MB


@dataclass(frozen=True)
class Tree:
    """A version's manifest."""

    files: list[pb.File]  # sorted by path

    @functools.cached_property
    def paths(self) -> dict[bytes, str]:
        """A file that holds each chunk."""
        return {chunk.hash: file.path for file in self.files for chunk in file.chunks}

    @functools.cached_property
    def names(self) -> list[str]:
        """Paths, sorted."""
        return [file.path for file in self.files]

    def file(self, path: str) -> pb.File | None:
        """The file or link of that path."""
        at = bisect_left(self.names, path)
        return self.files[at] if at < len(self.files) and self.names[at] == path else None

    @functools.cached_property
    def weight(self) -> int:
        """Files and chunks."""
        return len(self.files) + sum(len(file.chunks) for file in self.files)


class Trees:
    """Reads manifests, and remembers the recent ones: a version never changes."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: OrderedDict[str, Tree] = OrderedDict()

    async def of(self, row: VersionRow) -> Tree:
        """The tree of a version.

        Raises:
            DataLoss: what is stored does not match the version's digest.
        """
        if row.id in self._known:
            self._known.move_to_end(row.id)
            return self._known[row.id]
        tree = await self._store.read(lambda session: Tree(list(catalog.read_manifest(session, row).files)))
        self._known[row.id] = tree
        while sum(known.weight for known in self._known.values()) > _REMEMBERED_CHUNKS and len(self._known) > 1:
            self._known.popitem(last=False)
        return tree
