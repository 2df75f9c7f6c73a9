"""`exit.bin`: why this node ended, written once and to stay, before anybody is told."""

from __future__ import annotations

import json
import os
from pathlib import Path

from google.protobuf import json_format
from trainyard_protos.v1 import common_pb2

from trainyard.agent.boot import EXIT_DRAFT

EXIT_FILE = "exit.bin"
TERMINATION_FILE = Path("/dev/termination-log")
TERMINATION_BYTES = 4000  # Kubernetes keeps 4096


def write_exit(folder: Path, exit: common_pb2.Exit) -> None:
    """Writes the record so that it is there whole, or not at all, even after the machine loses power.

    It is written over what `boot.claim` reserved, so a full disk does not keep it out. On a file system that copies on
    write, or when the reserve was removed, it can still fail.

    Raises:
        OSError: the disk is full, or the folder is gone.
    """
    draft = os.open(folder / EXIT_DRAFT, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with open(draft, "wb") as file:
        file.write(exit.SerializeToString())
        file.truncate()
        file.flush()
        os.fsync(file.fileno())
    (folder / EXIT_DRAFT).rename(folder / EXIT_FILE)
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def write_termination(exit: common_pb2.Exit, file: Path = TERMINATION_FILE) -> None:
    """The same for Kubernetes, which keeps it with the pod when the pod's folders are gone: JSON, so that people can
    read it there.

    Raises:
        OSError: the file cannot be written.
    """
    file.write_text(_bounded(exit))


def _bounded(exit: common_pb2.Exit) -> str:
    """The record as JSON of at most `TERMINATION_BYTES`: the oldest lines give way, then the end of the message."""
    kept = common_pb2.Exit()
    kept.CopyFrom(exit)
    text = _json(kept)
    while len(text) > TERMINATION_BYTES and (kept.last_lines or len(kept.unstored) > 1 or kept.message):
        if kept.last_lines:
            del kept.last_lines[0]
        elif len(kept.unstored) > 1:
            del kept.unstored[-1]
        else:
            kept.message = kept.message[: len(kept.message) // 2]
        text = _json(kept)
    return text


def _json(exit: common_pb2.Exit) -> str:
    # ASCII: as many bytes as characters.
    return json.dumps(json_format.MessageToDict(exit, preserving_proto_field_name=True))
