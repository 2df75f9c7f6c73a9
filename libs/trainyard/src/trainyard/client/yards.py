"""Starting a yard on this machine."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO

from trainyard import errors, home, inherited
from trainyard.client.permissions import make_private

logger = logging.getLogger(__name__)

LOG_FILE = "yard.log"
WITHHELD_FILE = "withheld-variables"


@dataclass(slots=True)
class StartingYard:
    """A yard that was started and does not serve yet."""

    process: subprocess.Popen[bytes]
    ready: int
    """Read end of the pipe on which the yard says once that it serves, or why it cannot."""
    folder: Path
    published: str
    """File in the folder that says where it is."""

    def wait(self) -> str:
        """Waits until it serves; returns its endpoint.

        Raises:
            InvalidArgument: an option or a setting is wrong.
            NotRunning: it did not come up.
        """
        with os.fdopen(self.ready) as pipe:
            said = pipe.readline()
        answer = json.loads(said) if said else {"error": f"it ended with code {self.process.wait()}"}
        if "endpoint" in answer:
            return str(answer["endpoint"])
        other = home.read_endpoint(self.folder, self.published)
        if other is not None:  # started by somebody else in the meantime
            return other.endpoint
        if answer.get("whose") == "caller":
            raise errors.InvalidArgument(f"the yard did not start: {answer['error']}", reason="InvalidSetting")
        raise errors.NotRunning(
            f"the yard did not start: {answer['error']}",
            reason="YardNotStarted",
            hint=f"its log is {self.folder / LOG_FILE}",
        )


def start(folder: Path, arguments: Sequence[str] = ()) -> StartingYard:
    """Starts a yard for `folder`, detached from this terminal; it serves when `wait()` returns.

    Args:
        folder: its TRAINYARD_HOME; made when it is missing.
        arguments: options of `python -m trainyard_embedded`.

    Raises:
        InvalidArgument: as of `prepare`.
    """
    prepare(folder)
    return _start(folder, arguments, home.YARD_FILE)


def start_reading(folder: Path) -> StartingYard:
    """Starts a yard that only reads a home with data; commands share it, and it ends with them (decision 0036).

    Raises:
        InvalidArgument: the services are not installed, or this user may not write the log in the folder.
    """
    require_services()
    return _start(folder, ["--read-only"], home.READER_FILE)


def _start(folder: Path, arguments: Sequence[str], published: str) -> StartingYard:
    with _open_log(folder) as log:
        ready, said = os.pipe()
        process = subprocess.Popen(
            command(folder, [*arguments, "--ready-fd", str(said)]),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[said],
            start_new_session=True,
            cwd="/",
        )
    os.close(said)
    return StartingYard(process, ready, folder, published)


def require_services() -> None:
    """Raises InvalidArgument when this Python has only the client, and no yard to start."""
    if find_spec("trainyard_embedded") is None:
        raise errors.InvalidArgument(
            "the services of a yard are not installed here, so none can be started",
            reason="PackageMissing",
            hint="pip install 'trainyard[yard]', or set TRAINYARD_ENDPOINT or a context to a yard elsewhere",
        )


def _open_log(folder: Path) -> BinaryIO:
    try:
        return (folder / LOG_FILE).open("ab")
    except OSError as error:
        raise errors.InvalidArgument(
            f"{folder / LOG_FILE} cannot be written: {error.strerror}",
            reason="InvalidHome",
            hint="a command that finds no running yard starts a process that logs there: run it as the owner of the "
            "folder, or set TRAINYARD_HOME to a folder of your own",
        ) from error


def prepare(folder: Path) -> None:
    """Makes a folder the home of a yard, its owner's alone, and says which variables its jobs will not see.

    Raises:
        InvalidArgument: the services are not installed, or the folder cannot be made, or is no place for a yard.
    """
    require_services()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise errors.InvalidArgument(
            f"{folder} cannot be a yard's home: {error.strerror}",
            reason="InvalidHome",
            hint="set TRAINYARD_HOME to a folder that you may write to",
        ) from error
    make_private(folder)
    _tell_what_is_withheld(folder)


def _tell_what_is_withheld(folder: Path) -> None:
    """Once for each variable: the names that were told are kept in the home."""
    declared = inherited.patterns(os.environ.get(inherited.VARIABLE, ""))
    file = folder / WITHHELD_FILE
    told = set(file.read_text().split()) if file.exists() else set()
    new = [name for name in inherited.withheld_credentials(os.environ, declared) if name not in told]
    if new:
        logger.warning(
            "not passed to jobs: %s. Jobs do not inherit what looks like credentials: give it to a job with "
            "spec.secrets, or to all with %s=%s",
            ", ".join(new),
            inherited.VARIABLE,
            ",".join(new),
        )
        file.write_text("".join(f"{name}\n" for name in sorted(told.union(new))))


def command(folder: Path, arguments: Sequence[str] = ()) -> list[str]:
    """The command that is a yard."""
    return [sys.executable, "-m", "trainyard_embedded", "--home", str(folder), *arguments]
