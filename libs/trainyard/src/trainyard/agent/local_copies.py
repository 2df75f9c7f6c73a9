"""Copies of stored checkpoints in the job's folder: one that the store's retention dropped is removed here as well."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

from trainyard_protos.v1 import artifacts_pb2

from trainyard import copies
from trainyard.agent.plan import Plan
from trainyard.agent.store import CALL_TIMEOUT_S, Store
from trainyard.copies import Signature

_PAGE = 200


@dataclass(slots=True)
class _Copy:
    path: Path
    signature: Signature
    complete_ns: int  # from before the store took it
    step: int
    version_id: str  # "" when the answer did not name it: of a part, or of what another node stores
    dropped: bool = False


class LocalCopies:
    """Copies of the checkpoints of one node.

    The copy of the newest step is never removed, nor one that changed after it was stored, is being uploaded, is part
    of an output, or is open in another process. All of them are in the store, or were dropped there.
    """

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        root: Path,
        store: Store,
        uploading: Callable[[], set[Path]],
        removed: Callable[[str], None],
    ) -> None:
        """
        Args:
            folder: the node's.
            root: the job's.
            uploading: the entries that wait for their upload, the one that is being uploaded included.
            removed: takes the name of an entry that was removed.
        """
        self._plan = plan
        self._folder = folder
        self._store = store
        self._uploading = uploading
        self._removed = removed
        self._outputs = [(root / output.path).resolve() for output in plan.outputs]
        self._copies: dict[Path, _Copy] = {}
        self._removing: asyncio.Future[bool] | None = None
        self._seen_ns = 1  # when the newest of the deleted versions that were seen was deleted

    def add(self, path: Path, signature: Signature, complete_ns: int, step: int, version_id: str = "") -> None:
        """Takes in a copy, once what it is a copy of is stored.

        Args:
            complete_ns: of the entry, from before the store took it.
            version_id: "" for a part of a version, and for a copy of what node 0 stores.
        """
        self._copies[path] = _Copy(path, signature, complete_ns, step, version_id)
        if version_id and not self._is_output(path.resolve()):
            self._record(self._copies[path])

    def record_outputs(self) -> None:
        """Records the copies that are part of an output, once outputs are stored or none will be.

        Before that, a copy whose version was dropped may be the only one of what the output has to contain.
        """
        for copy in self._copies.values():
            if copy.version_id and self._is_output(copy.path.resolve()):
                self._record(copy)

    def _record(self, copy: _Copy) -> None:
        try:
            copies.record_checkpoint(self._folder, copy.path, copy.signature, copy.complete_ns)
        except OSError as error:
            print(f"the copy of {copy.path.name} is not recorded: {error}", flush=True)  # noqa: T201 (the agent's log)

    async def remove_dropped(self) -> None:
        """Removes the copies of versions that the store has deleted.

        Raises:
            Refused: the store does not list them.
        """
        if len(self._copies) < 2:
            return
        newest = max(copy.step for copy in self._copies.values())
        async for version in self._deleted():
            self._seen_ns = max(self._seen_ns, version.deleted_ns)
            for copy in self._copies.values():
                copy.dropped = copy.dropped or (copy.step < newest and self._is_of(copy, version))
        for copy in [copy for copy in self._copies.values() if copy.dropped]:
            await self._remove(copy)

    async def _remove(self, copy: _Copy) -> None:
        if copy.path in self._uploading() or self._is_output(copy.path.resolve()):
            return
        if not copy.version_id:
            self._record(copy)
        try:
            work = asyncio.to_thread(
                copies.remove_checkpoint, self._folder, copy.path, copy.signature, copy.complete_ns
            )
            self._removing = asyncio.ensure_future(work)
            done = await asyncio.shield(self._removing)
        except OSError as error:
            print(f"{copy.path.name} is not removed: {error}", flush=True)  # noqa: T201 (the agent's log)
            return
        if done and self._copies.get(copy.path) is copy:
            del self._copies[copy.path]
            self._removed(copy.path.name)

    async def finish(self) -> None:
        """Returns once nothing is being removed any more: outputs are stored next."""
        if self._removing is not None:
            await asyncio.wait([self._removing])

    def _is_output(self, path: Path) -> bool:
        return any(path.is_relative_to(output) or output.is_relative_to(path) for output in self._outputs)

    def _is_of(self, copy: _Copy, version: artifacts_pb2.Version) -> bool:
        if copy.version_id:
            return version.id == copy.version_id
        of_attempt = version.producer.attempt_id == self._plan.attempt_id
        return of_attempt and version.checkpoint.step == copy.step

    async def _deleted(self) -> AsyncIterator[artifacts_pb2.Version]:
        from trainyard.agent.checkpoints import artifact_name

        request = artifacts_pb2.ListVersionsRequest(
            workspace=self._store.workspace,
            name=artifact_name(self._plan.job_id),
            kind="checkpoint",
            job_id=self._plan.job_id,
            page_size=_PAGE,
            deleted_since_ns=self._seen_ns,
        )
        while True:
            answer = await self._store.call(lambda stub: stub.ListVersions(request, timeout=CALL_TIMEOUT_S))
            for version in answer.versions:
                if version.deleted_ns:  # yards of earlier releases list those that are there
                    yield version
            if not answer.next_page_token:
                return
            request.page_token = answer.next_page_token
