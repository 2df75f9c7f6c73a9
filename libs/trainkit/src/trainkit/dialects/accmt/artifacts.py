"""Files that go to the tracker's run."""

from __future__ import annotations

import os
from pathlib import Path

from trainkit.errors import InvalidSetup
from trainkit.trackers import MLflow


def store(tracker: MLflow | None, path: str | Path, *, folder: bool) -> None:
    """Stores a file, or all files below a folder, with the run; on the first process alone.

    Raises:
        InvalidSetup: there is no tracker.
        FileNotFoundError: there is no such file or folder.
    """
    if os.environ.get("RANK", "0") != "0":
        return
    if tracker is None:
        raise InvalidSetup("artifacts are stored with a tracker's run: give the trainer log_with='mlflow'")
    tracker.log_artifact(checked(path, folder=folder))


def checked(path: str | Path, *, folder: bool) -> Path:
    """The absolute path of a file or folder.

    Raises:
        FileNotFoundError: there is no such file or folder.
    """
    wanted = Path(path).resolve()
    if not (wanted.is_dir() if folder else wanted.is_file()):
        raise FileNotFoundError(f"there is no {'folder' if folder else 'file'} {path}")
    return wanted
