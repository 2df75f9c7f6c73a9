"""`exit.bin`: why this node ended, written once and to stay, before anybody is told."""

from __future__ import annotations

import os
from pathlib import Path

from trainyard_protos.v1 import common_pb2

EXIT_FILE = "exit.bin"


def write_exit(folder: Path, exit: common_pb2.Exit) -> None:
    """Writes the record so that it is there whole, or not at all, even after the machine loses power."""
    draft = folder / f"{EXIT_FILE}.new"
    with draft.open("wb") as file:
        file.write(exit.SerializeToString())
        file.flush()
        os.fsync(file.fileno())
    draft.rename(folder / EXIT_FILE)
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
