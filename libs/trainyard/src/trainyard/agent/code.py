"""The code of the job, put where the workers run."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from trainyard.agent.failure import NodeFailed
from trainyard.agent.plan import CodeGit, Plan
from trainyard.agent.processes import Reaper
from trainyard.agent.spawn import CannotStart
from trainyard.agent.store import Refused, Store

GIT_TIMEOUT_S = 600.0


async def fetch_code(plan: Plan, work: Path, store: Store, reaper: Reaper, log: Path) -> tuple[Path, str]:
    """Unpacks the job's code below `work`; where the workers run, and the id of the code's version ("" for none).

    Raises:
        NodeFailed: CodeUnavailable.
    """
    if plan.code_artifact:
        return work, await _unpack(plan.code_artifact, work, store)
    if plan.code_git:
        return await _clone(plan.code_git, work, reaper, log), ""
    return work, ""


async def _unpack(reference: str, work: Path, store: Store) -> str:
    from trainyard.artifacts import ArtifactError, download

    try:
        version = await store.call(
            lambda stub: download(stub, reference, work, workspace=store.workspace, merge=True),
        )
    except (Refused, ArtifactError) as error:
        raise NodeFailed("CodeUnavailable", f"code artifact '{reference}': {error}") from error
    return version.id


async def _clone(git: CodeGit, work: Path, reaper: Reaper, log: Path) -> Path:
    ref = git.ref or "HEAD"
    # Only the commit that is wanted, not the history.
    for command in (
        ["git", "init", "--quiet"],
        ["git", "fetch", "--quiet", "--depth", "1", "--", git.url, ref],
        ["git", "checkout", "--quiet", "--detach", "FETCH_HEAD"],
    ):
        await _git(command, work, reaper, log, f"{git.url} at {ref}")
    root = work / git.path
    if not await asyncio.to_thread(_is_folder_below, root, work):
        raise NodeFailed("CodeUnavailable", f"{git.url} at {ref} has no folder '{git.path}'")
    return root


def _is_folder_below(folder: Path, root: Path) -> bool:
    return folder.is_dir() and folder.resolve().is_relative_to(root.resolve())


async def _git(command: list[str], work: Path, reaper: Reaper, log: Path, what: str) -> None:
    environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}  # nobody is there to answer
    try:
        code = await reaper.run(command, log=log, cwd=work, env=environment, timeout_s=GIT_TIMEOUT_S)
    except CannotStart as error:
        raise NodeFailed("CodeUnavailable", f"code from git needs git on this machine: {error}") from error
    except TimeoutError as error:
        raise NodeFailed("CodeUnavailable", f"{what}: git took longer than {GIT_TIMEOUT_S:.0f} s") from error
    if code != 0:
        raise NodeFailed("CodeUnavailable", f"{what}: {tail(log) or f'git ended with {code}'}")


def tail(log: Path, lines: int = 20) -> str:
    """The last lines of a program's output."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
