"""The code of the job, put where the workers run."""

from __future__ import annotations

import asyncio
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainyard.agent.checkpoints import Note
from trainyard.agent.failure import NodeFailed
from trainyard.agent.plan import CodeGit, Plan
from trainyard.agent.processes import Reaper
from trainyard.agent.spawn import CannotStart
from trainyard.agent.store import Refused, Store
from trainyard.results import ResultPaths
from trainyard.source import from_labels, redacted

GIT_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Code:
    """The job's code in place.

    Args:
        root: where the workers run.
        version_id: of the artifact it came from; "" for none.
        artifact: reference, id and digest of that version; {} for none.
        git: commit, branch, remote, whether it differed from the commit, reference of the diff; {} when not known.
    """

    root: Path
    version_id: str = ""
    artifact: dict[str, str] = field(default_factory=dict)
    git: dict[str, Any] = field(default_factory=dict)


async def fetch_code(plan: Plan, work: Path, store: Store, reaper: Reaper, log: Path, note: Note) -> Code:
    """Unpacks the job's code below `work`, without files where the job writes its results.

    Raises:
        NodeFailed: CodeUnavailable.
    """
    if plan.code_artifact:
        code = await _unpack(plan.code_artifact, work, store)
    elif plan.code_git:
        code = await _clone(plan, plan.code_git, work, reaper, log)
    else:
        return Code(work)
    if removed := await asyncio.to_thread(_remove_results, code.root, _results(plan)):
        note(
            "ResultsInCode",
            f"removed from the code, because the job writes its outputs or checkpoints there: {', '.join(removed)}; "
            "what the job needs from there belongs into spec.inputs, with another path",
        )
    return code


def _results(plan: Plan) -> ResultPaths:
    wanted = plan.checkpoints
    return ResultPaths.of(
        [output.path for output in plan.outputs],
        wanted.path if wanted else None,
        wanted.pattern if wanted else "",
    )


def _remove_results(root: Path, results: ResultPaths) -> list[str]:
    """Removes what code brought along as results; returns the paths of what was removed."""
    removed = []
    for place in results.present(root):
        path = root / place
        if not path.parent.resolve().is_relative_to(root.resolve()):
            continue  # behind a link that leaves the job's folder: not the job's
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
        removed.append(repr(str(place)))
    return removed


async def _unpack(reference: str, work: Path, store: Store) -> Code:
    from trainyard.artifacts import FRUGAL, ArtifactError, download

    try:
        version = await store.call(
            lambda stub: download(stub, reference, work, workspace=store.workspace, merge=True, pace=FRUGAL),
        )
        await store.record_use(version.id)
    except (Refused, ArtifactError) as error:
        raise NodeFailed("CodeUnavailable", f"code artifact '{reference}': {error}") from error
    facts = {"artifact": f"{version.name}@{version.number}", "version": version.id, "digest": version.digest.hex()}
    return Code(work, version.id, facts, from_labels(version.labels))


async def _clone(plan: Plan, git: CodeGit, work: Path, reaper: Reaper, log: Path) -> Code:
    from trainyard.source import git_context, without_credentials

    ref = git.ref or "HEAD"
    shown = redacted(git.url)
    # Only the commit that is wanted, not the history.
    for command in (
        ["git", "init", "--quiet"],
        ["git", "fetch", "--quiet", "--depth", "1", "--", git.url, ref],
        ["git", "checkout", "--quiet", "--detach", "FETCH_HEAD"],
    ):
        await _git(command, plan, work, reaper, log, f"{shown} at {ref}")
    root = work / git.path
    if not await asyncio.to_thread(_is_folder_below, root, work):
        raise NodeFailed("CodeUnavailable", f"{shown} at {ref} has no folder '{git.path}'")
    found = await asyncio.to_thread(git_context, work, diff=False)
    return Code(root, git=found | {"remote": without_credentials(git.url), "ref": ref})


def _is_folder_below(folder: Path, root: Path) -> bool:
    return folder.is_dir() and folder.resolve().is_relative_to(root.resolve())


async def _git(command: list[str], plan: Plan, work: Path, reaper: Reaper, log: Path, what: str) -> None:
    # What a private repository asks for comes as secrets: GIT_CONFIG_*, GIT_SSH_COMMAND and their like.
    of_the_job = {name: value for name, value in plan.env.items() if name.startswith("GIT_")}
    environment = {**os.environ, **of_the_job, "GIT_TERMINAL_PROMPT": "0"}  # no person could answer
    try:
        code = await reaper.run(command, log=log, cwd=work, env=environment, timeout_s=GIT_TIMEOUT_S)
    except CannotStart as error:
        raise NodeFailed("CodeUnavailable", f"code from git needs git on this machine: {error}") from error
    except TimeoutError as error:
        raise NodeFailed("CodeUnavailable", f"{what}: git took longer than {GIT_TIMEOUT_S:.0f} s") from error
    if code != 0:
        raise NodeFailed("CodeUnavailable", redacted(f"{what}: {tail(log) or f'git ended with {code}'}"))


def tail(log: Path, lines: int = 20) -> str:
    """The last lines of a program's output."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
