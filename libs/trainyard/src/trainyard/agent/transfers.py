"""Inputs before the workers start, outputs after they succeeded."""

from __future__ import annotations

import asyncio
from pathlib import Path

from trainyard.agent.confinement import OutsideJob, refuse_link_to_file, resolve_inside
from trainyard.agent.failure import NodeFailed
from trainyard.agent.plan import Input, Output
from trainyard.agent.store import Refused, Store
from trainyard.copies import complete_ns


async def fetch_inputs(inputs: list[Input], root: Path, store: Store) -> list[str]:
    """Puts input artifacts below `root`; returns the ids of their versions.

    Raises:
        NodeFailed: InputUnavailable.
    """
    return [await _fetch(each, root, store) for each in inputs]


async def _fetch(each: Input, root: Path, store: Store) -> str:
    from trainyard.artifacts import FRUGAL, ArtifactError, download

    try:
        target = resolve_inside(root, each.path)
        version = await store.call(
            lambda stub: download(stub, each.artifact, target, workspace=store.workspace, pace=FRUGAL)
        )
        await store.record_use(version.id)
    except (Refused, ArtifactError, OutsideJob) as error:
        raise NodeFailed("InputUnavailable", f"input '{each.artifact}' for '{each.path}': {error}") from error
    return version.id


async def store_outputs(
    outputs: list[Output], root: Path, store: Store, *, attempt_id: str, made_from: list[str], since_ns: int = 0
) -> list[str]:
    """Stores outputs found below `root`; returns what could not be stored, in words.

    Args:
        since_ns: an output in which nothing changed after this time (`st_ctime_ns`) is code or input, and is not
            stored; 0 stores every output.
    """
    unstored = []
    for output in outputs:
        try:
            await _store(output, root, store, attempt_id, made_from, since_ns)
        except NodeFailed as error:
            unstored.append(error.message)
    return unstored


async def _store(
    output: Output, root: Path, store: Store, attempt_id: str, made_from: list[str], since_ns: int
) -> None:
    from trainyard.artifacts import FRUGAL, ArtifactError, upload

    try:
        path = resolve_inside(root, output.path)  # nothing of the job runs any more that could change it
        refuse_link_to_file(root / output.path)
        if not path.exists():
            raise NodeFailed(
                "OutputsNotStored", f"output '{output.path}' does not exist: the workers ended without writing it"
            )
        if since_ns and await asyncio.to_thread(complete_ns, path) <= since_ns:
            raise NodeFailed(
                "OutputsNotStored",
                f"output '{output.path}' holds only the code or inputs that were there before the workers started: "
                "the workers ended without writing it",
            )
        base, names = (path, None) if path.is_dir() else (path.parent, [Path(path.name)])
        await store.call(
            lambda stub: upload(
                stub,
                base,
                names,
                workspace=store.workspace,
                name=output.artifact,
                kind="output",
                idempotency_key=f"{attempt_id}/{output.artifact}/{output.path}",
                producer=store.producer,
                inputs=made_from,
                pace=FRUGAL,
            )
        )
    except (Refused, ArtifactError, OutsideJob, OSError) as error:
        raise NodeFailed("OutputsNotStored", f"output '{output.path}': {error}") from error
