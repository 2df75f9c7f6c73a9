"""A run of tests: one pytest with the workers of xdist below it.

It has a reaper, a process of its own session that waits for the end of the run. Then the reaper ends every process that
the run has started, and runs the commands that the run has not taken back. Every temporary folder of the run is below
one, which is removed as well.
"""

from __future__ import annotations

import os
import secrets
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts.testbed import fetch
from scripts.testbed.runs import folders, groups, journal

JOURNAL = "TRAINYARD_TESTBED_RUN"
"""Names the journal; it is in the environment of every process of the run that does not take one of its own."""
_OUTSIDE = "TRAINYARD_TESTBED_OUTSIDE"
_REPOSITORY = Path(__file__).parents[3]
_FOLDERS = "folders"
# Names where pytest keeps the folders of its last runs, to be looked into.
_PYTEST_FOLDERS = "PYTEST_DEBUG_TEMPROOT"


class Run:
    """The run that this process leads; made when it begins."""

    def __init__(self) -> None:
        """Begins it: from here on, what this process starts is ended with it."""
        name = f"trainyard-run-{secrets.token_hex(4)}"
        self.why_no_group = ""
        self._journal = fetch.CACHE / "runs" / f"{name}.jsonl"
        self._log = self._journal.with_suffix(".log")
        journal.create(self._journal)
        self._temporary = Path(tempfile.gettempdir())
        self._reaper = self._start_reaper()
        self._make_folder(name)
        self._outside = self._enter_group(name)
        os.environ[JOURNAL] = str(self._journal)

    def note_pytest_folder(self) -> None:
        """Notes which folder pytest keeps of this run; for when pytest is about to unlock it."""
        for folder in folders.kept_by_pytest(Path(os.environ[_PYTEST_FOLDERS]), os.getpid()):
            journal.note_command(self._journal, _FOLDERS, [*self._remove_folders, str(folder)])

    def end(self) -> str:
        """Ends it, and returns when all that it has started and made is gone, but this process.

        Returns:
            What could not be cleaned up; empty when nothing is left.
        """
        if self._outside is not None:
            groups.move(self._outside)
        self._reaper.communicate(b"end\n")
        for variable in (JOURNAL, _OUTSIDE):
            os.environ.pop(variable, None)
        os.environ["TMPDIR"] = tempfile.tempdir = str(self._temporary)
        return self._log.read_text() if self._log.exists() else ""

    def _start_reaper(self) -> subprocess.Popen[bytes]:
        this = os.pidfd_open(os.getpid())
        with self._log.open("ab") as log:
            reaper = subprocess.Popen(
                [sys.executable, "-m", "scripts.testbed.runs.reaper", str(self._journal), str(this)],
                cwd=_REPOSITORY,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                pass_fds=(this,),
                start_new_session=True,
            )
        os.close(this)
        assert reaper.stdout is not None
        if not reaper.stdout.readline():
            raise RuntimeError(f"the reaper of this run of tests did not start:\n{self._log.read_text()}")
        return reaper

    def _make_folder(self, name: str) -> None:
        folder = self._temporary / name
        kept = os.environ.setdefault(_PYTEST_FOLDERS, str(self._temporary))
        program = [sys.executable, "-m", "scripts.testbed.runs.folders"]
        self._remove_folders = [*program, str(folder), kept, str(os.getpid())]
        journal.note_command(self._journal, _FOLDERS, self._remove_folders)
        folder.mkdir()
        folder.chmod(0o1777)  # as the one that it is in: some servers run as another user
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder)

    def _enter_group(self, name: str) -> Path | None:
        try:
            outside = groups.own()
            places = groups.places(name)
            for group in places:
                journal.note_group(self._journal, group)
            groups.enter(places)
        except groups.NoGroup as error:
            self.why_no_group = str(error)
            return None
        os.environ[_OUTSIDE] = str(outside / "cgroup.procs")
        return outside


def name() -> str:
    """The name of the run that this process belongs to; empty without a run."""
    return Path(os.environ.get(JOURNAL, "")).stem


@contextmanager
def cleaned_up_if_killed(*command: str | Path) -> Iterator[None]:
    """Within it, the end of the run by a kill leads to the command, after the processes of the run have ended.

    What is entered later is cleaned up earlier. Without a run it does nothing.

    Args:
        command: it has to succeed when there is nothing left for it to do; it runs in the checkout.
    """
    path = os.environ.get(JOURNAL)
    if path is None:
        yield
        return
    key = secrets.token_hex(8)
    journal.note_command(Path(path), key, [str(part) for part in command])
    yield
    journal.note_done(Path(path), key)


def outside(command: list[str]) -> list[str]:
    """The command, started so that it does not belong to this run, because other runs share what it starts."""
    group = os.environ.get(_OUTSIDE)
    if group is None:
        return command
    return ["sh", "-ec", f'echo 0 > {shlex.quote(group)}; exec "$@"', "sh", *command]
