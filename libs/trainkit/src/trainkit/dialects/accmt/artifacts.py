"""Files that go to the tracker's run."""

from __future__ import annotations

import os
from pathlib import Path

from trainkit.errors import InvalidSetup
from trainkit.trackers import MLflow


def store(tracker: MLflow | None, path: str | Path, *, folder: bool) -> None:
    """Stores a file, or all files below a folder, with the run; on the first process alone.

    Raises:
        InvalidSetup: there is no tracker, or its run has not begun.
        FileNotFoundError: there is no such file or folder.
    """
    if os.environ.get("RANK", "0") != "0":
        return
    if tracker is None:
        raise InvalidSetup("artifacts go to a tracker's run: give the trainer log_with='mlflow', and call fit first")
    wanted = Path(path)
    if not (wanted.is_dir() if folder else wanted.is_file()):
        raise FileNotFoundError(f"there is no {'folder' if folder else 'file'} {wanted}")
    tracker.log_artifact(wanted)
