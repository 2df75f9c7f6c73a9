"""The folder of a run's checkpoints.

A checkpoint is a folder `step-<n>` with a manifest that names every other file in it, its size and its SHA-256. It is
written as `.draft-step-<n>` and renamed when everything is durable, so that a name that matches is always whole, or was
damaged later, which the checksums show. What is given up is renamed before it is deleted.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainkit.checkpoints.files import Stored, sha256, sync_folder, write
from trainkit.checkpoints.policy import Best
from trainkit.errors import DamagedCheckpoint
from trainkit.trackers.clock import moment_of

MANIFEST = "manifest.json"
FORMAT = 1
_NAME = re.compile(r"step-(\d+)")


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint says of itself."""

    step: int
    world_size: int
    results: Mapping[str, float]
    files: Sequence[Stored]
    turn: int = 0
    """Counts the checkpoints of this folder in the order in which they were made. That need not be the order of their
    steps: a run may go on from an older one."""
    logged_until: float | None = None
    """Rows of trackers up to this time are in this checkpoint; a run that resumes from it logs later ones again."""


def draft(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is written."""
    return folder / f".draft-step-{step}"


def commit(folder: Path, manifest: Manifest) -> Path:
    """Makes the draft of `manifest.step` a checkpoint, the newest one. Only one process may do it, when all files are
    durable."""
    at = draft(folder, manifest.step)
    turn = 1 + max((_turn(folder, step) for step in steps(folder)), default=0)
    body = {"format": FORMAT, **asdict(manifest), "turn": turn}
    write(at / MANIFEST, [json.dumps(body, indent=1).encode()])
    _stamp(at, manifest.logged_until)
    sync_folder(at)
    final = folder / f"step-{manifest.step}"
    _take_name(at, final)
    return final


def commit_part(folder: Path, step: int, kept: Sequence[int], logged_until: float | None) -> None:
    """Gives the part that this machine has of a checkpoint its name, once the first process has committed.

    Does nothing where the first process sees this folder too, or another process of this machine was quicker. A part
    is no checkpoint to go on from; a yard joins it with the others.

    Args:
        kept: the steps that the first process keeps.
        logged_until: as in the manifest.
    """
    mine = folder / f".draft-step-{step}-part"
    try:
        draft(folder, step).rename(mine)  # one process alone can do that
    except FileNotFoundError:
        return
    _stamp(mine, logged_until)
    _take_name(mine, folder / f"step-{step}")
    for other in set(steps(folder)) - set(kept):
        discard(folder / f"step-{other}")


def _stamp(at: Path, logged_until: float | None) -> None:
    """Gives the files the time of the state in them: a yard ends the rows of this checkpoint there, and not when the
    files were written, by when the run has logged more."""
    if logged_until is not None:
        time_ns = int(moment_of(logged_until) * 1e9)
        for path in at.iterdir():
            os.utime(path, ns=(time_ns, time_ns))


def _take_name(at: Path, final: Path) -> None:
    """What had the name before is there until the other has it: it may be the only checkpoint."""
    before = final.with_name(f".before-{final.name}")
    if final.exists():
        shutil.rmtree(before, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):  # a yard removed it just now: its store has dropped it
            final.rename(before)
    at.rename(final)
    sync_folder(final.parent)
    shutil.rmtree(before, ignore_errors=True)


def steps(folder: Path) -> list[int]:
    """The steps that have a checkpoint, in order."""
    if not folder.is_dir():
        return []
    found = (_NAME.fullmatch(path.name) for path in folder.iterdir())
    return sorted(int(match[1]) for match in found if match)


def by_age(folder: Path) -> list[int]:
    """The steps that have a checkpoint, in the order in which those were made, the oldest first."""
    return sorted(steps(folder), key=lambda step: (_turn(folder, step), step))


def by_preference(folder: Path) -> list[int]:
    """The steps that have a checkpoint, the newest first. Without a readable manifest the age is not known, so such a
    checkpoint could be the newest, and comes before the others."""
    newest_first = list(reversed(by_age(folder)))
    readable = [step for step in newest_first if _is_readable(folder / f"step-{step}")]
    return [*(step for step in newest_first if step not in readable), *readable]


def _turn(folder: Path, step: int) -> int:
    try:
        return read_manifest(folder / f"step-{step}").turn
    except DamagedCheckpoint:
        return 0


def _is_readable(path: Path) -> bool:
    try:
        read_manifest(path)
    except DamagedCheckpoint:
        return False
    return True


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint at `path`.

    Raises:
        DamagedCheckpoint: it has none that can be read, or one of a newer format.
    """
    try:
        body: dict[str, Any] = json.loads((path / MANIFEST).read_text())
        files = [Stored(**entry) for entry in body["files"]]
        found = body["format"]
        manifest = Manifest(
            body["step"], body["world_size"], body["results"], files, body.get("turn", 0), body.get("logged_until")
        )
        _refuse_impossible(manifest)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpoint(f"{path}: {MANIFEST} cannot be read: {type(error).__name__}: {error}") from error
    if found != FORMAT:
        raise DamagedCheckpoint(f"{path} has format {found}, this trainkit reads format {FORMAT}")
    return manifest


def _refuse_impossible(manifest: Manifest) -> None:
    """The manifest itself has no checksum: what it says is looked at before anything is done by it."""
    counts = {"step": manifest.step, "world_size": manifest.world_size, "turn": manifest.turn}
    if wrong := [f"{name} is {count!r}" for name, count in counts.items() if type(count) is not int or count < 0]:
        raise ValueError(", ".join(wrong))
    if manifest.logged_until is not None and not isinstance(manifest.logged_until, int | float):
        raise ValueError(f"logged_until is {manifest.logged_until!r}")
    results = manifest.results
    if not isinstance(results, dict) or not all(isinstance(value, int | float) for value in results.values()):
        raise ValueError(f"results is {results!r}")
    if outside := [file.name for file in manifest.files if file.name != Path(file.name).name]:
        raise ValueError(f"{outside[0]!r} is not a file of this folder")


def verify(path: Path) -> Manifest:
    """The manifest of a checkpoint whose files are all as they were written.

    Raises:
        DamagedCheckpoint: one is not; the message names it.
    """
    manifest = read_manifest(path)
    for file in manifest.files:
        at = path / file.name
        if not at.is_file() or at.stat().st_size != file.size:
            raise DamagedCheckpoint(f"{at} is missing or does not have its {file.size} bytes")
        if sha256(at) != file.sha256:
            raise DamagedCheckpoint(f"{at} has other bytes than when it was written: its SHA-256 differs")
    return manifest


def discard(path: Path) -> None:
    """Takes a checkpoint away: first its name, then its bytes."""
    trash = path.with_name(f".trash-{path.name}")
    shutil.rmtree(trash, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):  # a yard removed it just now: its store has dropped it
        path.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Mends what killed processes left: drafts and trash go, what was to be replaced and was not comes back."""
    for path in folder.glob(".before-step-*"):
        final = folder / path.name.removeprefix(".before-")
        if final.exists():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.rename(final)
    for path in folder.glob(".draft-step-*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(".trash-step-*"):
        shutil.rmtree(path, ignore_errors=True)


def retain(folder: Path, newest: int, keep_last: int, best: Best | None) -> None:
    """Discards all but the last `keep_last` checkpoints up to step `newest`, which was just made, and the best one.

    What is of a later step does not count: the run did not go on from it, because it is damaged or another was named.
    """
    present = [step for step in by_age(folder) if step <= newest]
    kept = set(present[-keep_last:])
    if best is not None:
        kept.update(best_step(folder, present, best))
    for step in present:
        if step not in kept:
            discard(folder / f"step-{step}")


def best_step(folder: Path, present: Sequence[int], best: Best) -> list[int]:
    """The step with the best value of `best.metric`, the earliest of equals; none when none has the metric."""
    winner: list[int] = []
    value: float | None = None
    for step in present:
        try:
            found = read_manifest(folder / f"step-{step}").results.get(best.metric)
        except DamagedCheckpoint:
            continue
        if found is not None and best.better(found, value):
            winner, value = [step], found
    return winner
