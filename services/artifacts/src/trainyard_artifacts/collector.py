"""Removes chunks that no version and no waiting part uses.

Safe while uploads run: marking reads every manifest that was committed before, and a chunk that an upload or a commit
asked about since then is younger than the grace time.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from dataclasses import dataclass

from prometheus_client import Counter
from servicekit.ids import now_ns
from servicekit.store import Store
from sqlmodel import Session, col, delete, select
from trainyard.artifacts import manifest
from trainyard_protos.v1 import artifacts_pb2 as pb

from trainyard_artifacts.blobs import BlobStore
from trainyard_artifacts.settings import Settings
from trainyard_artifacts.tables import ManifestRow, PartRow

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Collector:
    """Collects at intervals until it is cancelled."""

    store: Store
    blobs: BlobStore
    settings: Settings
    collected: Counter

    async def run(self) -> None:
        """Collects for ever; one that failed is logged, and tried again at the next interval."""
        while True:
            await asyncio.sleep(self.settings.collect_interval_s)
            try:
                await self.collect()
            except Exception:
                logger.exception("collection of unused chunks failed")

    async def collect(self) -> int:
        """One collection; returns how many chunks were removed."""
        oldest_part_ns = now_ns() - int(self.settings.part_ttl_s * 1e9)
        await self.store.write(lambda session: _drop_parts(session, oldest_part_ns))
        removed = 0
        for workspace in await self.blobs.workspaces():
            used = await self.store.read(functools.partial(used_chunks, workspace=workspace))
            removed += await self.blobs.sweep(workspace, used, self.settings.chunk_grace_s)
        self.collected.inc(removed)
        return removed


def used_chunks(session: Session, workspace: str) -> set[bytes]:
    """Chunks of every version and of every waiting part."""
    used: set[bytes] = set()
    for content in session.exec(select(ManifestRow.content).where(ManifestRow.workspace == workspace)):
        used |= manifest.hashes(pb.Manifest.FromString(content))
    for request in session.exec(select(PartRow.request).where(PartRow.workspace == workspace)):
        used |= manifest.hashes(pb.CommitRequest.FromString(request).manifest)
    return used


def _drop_parts(session: Session, before_ns: int) -> None:
    session.exec(delete(PartRow).where(col(PartRow.created_ns) < before_ns))
