"""Starting a yard on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainyard import errors, home

LOG_FILE = "yard.log"


@dataclass(slots=True)
class StartingYard:
    """A yard that was started and does not serve yet."""

    process: subprocess.Popen[bytes]
    ready: int
    """Read end of the pipe on which the yard says once that it serves, or why it cannot."""
    folder: Path

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
        other = home.read_endpoint(self.folder)
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
        InvalidArgument: the folder cannot be made.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise errors.InvalidArgument(
            f"{folder} cannot be a yard's home: {error.strerror}",
            reason="InvalidHome",
            hint="set TRAINYARD_HOME to a folder that you may write to",
        ) from error
    ready, said = os.pipe()
    with (folder / LOG_FILE).open("ab") as log:
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
    return StartingYard(process, ready, folder)


def command(folder: Path, arguments: Sequence[str] = ()) -> list[str]:
    """The command that is a yard."""
    return [sys.executable, "-m", "trainyard_embedded", "--home", str(folder), *arguments]
