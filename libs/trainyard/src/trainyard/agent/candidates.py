"""Finds checkpoints as a script writes them: entries of one folder whose names match a pattern.

An entry that was renamed into place is looked at immediately; one that is written in place, when nothing wrote to it
for the settle time.
"""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from inotify_simple import Event, flags

from trainyard.agent.changes import Changes
from trainyard.agent.confinement import OutsideJob, refuse_link_to_file, resolve_inside
from trainyard.agent.formats import is_whole
from trainyard.copies import Signature, signature

_GROUP = "{step}"
_WATCHED = flags.CREATE | flags.MODIFY | flags.CLOSE_WRITE | flags.MOVED_TO


@dataclass(frozen=True, slots=True)
class Candidate:
    """A whole checkpoint on disk."""

    path: Path
    step: int
    signature: Signature


class Pattern:
    """A glob with one `{step}` of at most 18 digits in it, for instance `step-{step}.pt` or `checkpoint-{step}*`."""

    def __init__(self, pattern: str) -> None:
        before, _, after = pattern.partition(_GROUP)
        self._regex = re.compile(f"{_regex(before)}([0-9]{{1,18}}){_regex(after)}")

    def step(self, name: str) -> int | None:
        """The step in a name, or None when it does not match."""
        found = self._regex.fullmatch(name)
        return int(found[1]) if found else None


def _regex(glob: str) -> str:
    return fnmatch.translate(glob).removesuffix(r")\Z").removeprefix("(?s:")


def check_checkpoint(root: Path, path: Path) -> None:
    """Refuses an entry that is a link to a file, or to a folder outside of the job's folder `root`.

    Raises:
        OutsideJob: it is one.
    """
    refuse_link_to_file(path)
    resolve_inside(root, path)


class Candidates:
    """Watches a folder and calls `found` for every new whole checkpoint."""

    def __init__(
        self,
        folder: Path,
        pattern: str,
        settle_s: float,
        found: Callable[[Candidate], None],
        refused: Callable[[str, OutsideJob], None],
        changes: Changes,
        *,
        root: Path,
    ) -> None:
        """
        Args:
            refused: takes the name of an entry that a link makes no checkpoint, and why, once.
            root: the job's folder; what is outside of it is not looked at.
        """
        self._folder = folder
        self._root = root
        self._refused_names: set[str] = set()
        self._refused = refused
        self._pattern = Pattern(pattern)
        self._settle_s = settle_s
        self._found = found
        self._known: dict[str, Signature] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._seen: dict[str, Signature] = {}
        self._changes = changes
        self._watches = {changes.watch(folder, _WATCHED, self._changed): ""}

    def ignore_present(self) -> None:
        """What is there now was there before the workers: it is no news."""
        for path in self._folder.iterdir():
            if self._pattern.step(path.name) is not None:
                with contextlib.suppress(OutsideJob):
                    self._known[path.name] = self._signature(path)

    def _changed(self, event: Event | None) -> None:
        if event is None:
            self._look_for_changes()
            return
        within = self._watches.get(event.wd)
        name = within or event.name
        if within is not None and self._pattern.step(name) is not None:
            renamed = not within and bool(event.mask & flags.MOVED_TO)
            self._watch_inside(name)
            self._schedule(name, 0.0 if renamed else self._settle_s)

    def _look_for_changes(self) -> None:
        """Schedules what was written since the last look, and what was open for writing at the last one."""
        for name in self._names():
            try:
                now = self._signature(self._folder / name)
            except OSError:
                continue  # gone again
            except OutsideJob:
                now = ()
            if now == self._known.get(name) or (name in self._timers and now == self._seen.get(name)):
                continue
            self._seen[name] = now
            self._schedule(name, self._settle_s)

    def look_at_all(self) -> None:
        """Considers everything that is there, as if it had just been written."""
        for name in self._names():
            self._schedule(name, self._settle_s)

    def _names(self) -> list[str]:
        """What matches, by step; of one step, what was changed first comes first."""
        found: list[tuple[int, int, str]] = []
        try:
            for path in self._folder.iterdir():
                if (step := self._pattern.step(path.name)) is not None:
                    with contextlib.suppress(FileNotFoundError):  # the script removed this one
                        found.append((step, path.lstat().st_mtime_ns, path.name))
        except FileNotFoundError:
            pass  # the script removed the whole folder
        return [name for _, _, name in sorted(found)]

    def _watch_inside(self, name: str) -> None:
        """What is written into a folder raises no event in the folder above it."""
        path = self._folder / name
        try:
            resolve_inside(self._root, path)
            for folder in (path, *(inner for inner in path.rglob("*") if inner.is_dir())) if path.is_dir() else ():
                self._watches[self._changes.watch(folder, _WATCHED, self._changed)] = name
        except (FileNotFoundError, OutsideJob):
            return

    def _schedule(self, name: str, after_s: float) -> None:
        if name in self._timers:
            self._timers[name].cancel()
        # Every further event starts the timer anew: when it ends, nothing was written for that long.
        self._timers[name] = asyncio.get_running_loop().call_later(after_s, self._look, name)

    def _look(self, name: str) -> None:
        self._timers.pop(name, None)
        path = self._folder / name
        step = self._pattern.step(name)
        try:
            now = self._signature(path)
            if step is not None and self._known.get(name) != now and is_whole(path):
                self._known[name] = now
                self._found(Candidate(path, step, now))
        except OSError:
            return  # gone again; its return would be an event
        except OutsideJob as error:
            if name not in self._refused_names:
                self._refused_names.add(name)
                self._refused(name, error)

    def _signature(self, path: Path) -> Signature:
        check_checkpoint(self._root, path)
        return signature(path)

    def forget(self, name: str) -> None:
        """An entry was removed, for its checkpoint was dropped; one that gets its name is new."""
        self._known.pop(name, None)

    def finish(self) -> list[str]:
        """Looks a last time, now that nobody writes any more; returns what is no whole checkpoint, by name."""
        for timer in self._timers.values():
            timer.cancel()
        self._changes.forget(self._changed)
        names = self._names()
        for name in names:
            self._look(name)
        return [name for name in names if name not in self._known and name not in self._refused_names]
