"""Trees of files to and from the artifact store: chunking, transfer, packing of code.

Used by the command line and by the agent inside of jobs; neither pydantic nor anything of the terminal is imported.
"""

from trainyard.artifacts.calls import FRUGAL, FULL, Pace, Progress
from trainyard.artifacts.download import download, sync
from trainyard.artifacts.errors import (
    ArtifactError,
    BadManifest,
    Damaged,
    FileChanged,
    NoRoom,
    TargetBusy,
    TargetExists,
    TreeTooLarge,
    UnsafePath,
)
from trainyard.artifacts.packing import CodeFiles, pack_code
from trainyard.artifacts.reading import list_files, read_file, version
from trainyard.artifacts.upload import Sent, describe, send, upload, upload_part

__all__ = [
    "FRUGAL",
    "FULL",
    "ArtifactError",
    "BadManifest",
    "CodeFiles",
    "Damaged",
    "FileChanged",
    "NoRoom",
    "Pace",
    "Progress",
    "Sent",
    "TargetBusy",
    "TargetExists",
    "TreeTooLarge",
    "UnsafePath",
    "describe",
    "download",
    "list_files",
    "pack_code",
    "read_file",
    "send",
    "sync",
    "upload",
    "upload_part",
    "version",
]
