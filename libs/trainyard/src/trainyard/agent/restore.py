"""Putting the newest verified checkpoint back before the workers start."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from trainyard_protos.v1 import artifacts_pb2, metrics_pb2

from trainyard.agent.checkpoints import Note, artifact_name
from trainyard.agent.plan import Plan
from trainyard.agent.store import Refused, Store
from trainyard.copies import Signature, complete_ns, signature

PAGE = 50
_GONE_OR_DAMAGED = (grpc.StatusCode.DATA_LOSS, grpc.StatusCode.NOT_FOUND)


@dataclass(frozen=True, slots=True)
class Restored:
    """The checkpoint an attempt resumes from."""

    version_id: str = ""  # "" for a fresh start
    path: str = ""
    step: int = -1
    fence: int = 0  # of the attempt that made it
    cut: dict[str, int] = field(default_factory=dict)
    elsewhere: metrics_pb2.Elsewhere | None = None  # of the cut: None when it names every writer
    signature: Signature = ()  # of its files as they were put back
    complete_ns: int = 0  # since when they are


FRESH = Restored()


async def restore(plan: Plan, folder: Path, store: Store, note: Note) -> Restored:
    """Downloads the newest checkpoint of the job that verifies into `folder`; FRESH when there is none.

    A damaged one is reported and the next older one taken.

    Raises:
        Refused: the store does not let this attempt read.
    """
    from trainyard.artifacts import ArtifactError

    async for version in _newest_first(plan, store):
        if version.id in plan.rejected_checkpoints:
            continue
        try:
            return await _fetch(version, folder, store)
        except Refused as error:
            if error.code not in _GONE_OR_DAMAGED:
                raise
            note("CheckpointDamaged", _skipped(version, error))
        except ArtifactError as error:
            note("CheckpointDamaged", _skipped(version, error))
    return FRESH


def _skipped(version: artifacts_pb2.Version, error: Exception) -> str:
    return f"checkpoint of step {version.checkpoint.step} ({version.name}@{version.number}) was skipped: {error}"


async def _newest_first(plan: Plan, store: Store) -> AsyncIterator[artifacts_pb2.Version]:
    """Checkpoints of the job by attempt and step: an upload may have been overtaken by that of a later step."""
    fence, of_attempt = 0, list[artifacts_pb2.Version]()
    async for version in _last_committed_first(plan, store):
        if of_attempt and version.producer.fence != fence:
            for each in _by_step(of_attempt):
                yield each
            of_attempt.clear()
        fence = version.producer.fence
        of_attempt.append(version)
    for each in _by_step(of_attempt):
        yield each


def _by_step(versions: list[artifacts_pb2.Version]) -> list[artifacts_pb2.Version]:
    return sorted(versions, key=lambda version: (version.checkpoint.step, version.number), reverse=True)


async def _last_committed_first(plan: Plan, store: Store) -> AsyncIterator[artifacts_pb2.Version]:
    request = artifacts_pb2.ListVersionsRequest(
        workspace=store.workspace,
        name=artifact_name(plan.job_id),
        kind="checkpoint",
        job_id=plan.job_id,
        page_size=PAGE,
    )
    while True:
        try:
            answer = await store.call(lambda stub: stub.ListVersions(request, timeout=60))
        except Refused as error:
            if error.code is grpc.StatusCode.NOT_FOUND:
                return
            raise
        for version in answer.versions:
            yield version
        if not answer.next_page_token:
            return
        request.page_token = answer.next_page_token


async def _fetch(version: artifacts_pb2.Version, folder: Path, store: Store) -> Restored:
    from trainyard.artifacts import FRUGAL, download

    request = artifacts_pb2.GetVersionRequest(workspace=store.workspace, reference=version.id)
    detail = await store.call(lambda stub: stub.GetVersion(request, timeout=60))
    entry = detail.manifest.files[0].path.partition("/")[0]
    await store.call(
        lambda stub: download(stub, version.id, folder, workspace=store.workspace, merge=True, pace=FRUGAL)
    )
    checkpoint = version.checkpoint
    return Restored(
        version_id=version.id,
        path=str(folder / entry),
        step=checkpoint.step,
        fence=version.producer.fence,
        cut=dict(checkpoint.cut),
        elsewhere=checkpoint.elsewhere if checkpoint.HasField("elsewhere") else None,
        signature=signature(folder / entry),
        complete_ns=complete_ns(folder / entry),
    )
