"""Packing the folder `code.path` of a document into an artifact."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainyard import errors
from trainyard.artifacts import ArtifactError, pack_code
from trainyard.client.connection import Connection
from trainyard.client.documents import Document
from trainyard.client.names import DIFF_FILE
from trainyard.client.transfer import upload_files
from trainyard.source import git_context, to_labels

if TYPE_CHECKING:
    from trainyard.spec import TrainingJob


def resolved(document: Document) -> TrainingJob:
    """What the document says, with every default filled in.

    Raises:
        InvalidSpec: the document is wrong.
    """
    from trainyard.spec import SpecError, load

    try:
        return load(document.text, document.filename)
    except SpecError as error:
        raise errors.InvalidSpec(str(error), problems=error.problems) from None


async def pack(connection: Connection, document: Document, workspace: str) -> str:
    """Stores the folder `code.path` of the document; returns a reference to exactly that version.

    What git knows about the folder goes into the version's labels; the diff of what is packed, which can be long, is an
    artifact of its own, named in a label.

    Raises:
        InvalidSpec: the document is wrong.
        InvalidArgument: the folder is missing, too large, or holds what cannot be stored.
    """
    job = resolved(document)
    code = job.spec.code
    if code is None or code.path is None:
        raise errors.InvalidArgument("the document has no 'code.path' to pack", reason="NoCode")
    root = document.folder / code.path
    files = await asyncio.to_thread(_files, root, code.exclude)
    labels = await _source(connection, root, files, workspace, f"{job.metadata.name}-diff")
    name = f"{job.metadata.name}-code"
    version = await upload_files(connection, root, files, workspace, name, kind="code", labels=labels)
    return f"{version.name}@{version.number}"


async def _source(
    connection: Connection, root: Path, files: Sequence[Path], workspace: str, name: str
) -> dict[str, str]:
    """Labels that say which commit the folder is at; the diff, if there is one, is stored as artifact `name`."""
    context = await asyncio.to_thread(git_context, root, paths=[path.as_posix() for path in files])
    if "diff" not in context:
        return to_labels(context)
    with tempfile.TemporaryDirectory() as folder:
        await asyncio.to_thread((Path(folder) / DIFF_FILE).write_text, context["diff"])
        diff = await upload_files(connection, Path(folder), [Path(DIFF_FILE)], workspace, name, kind="code")
    return to_labels(context, f"{diff.name}@{diff.number}")


def _files(root: Path, exclude: Sequence[str]) -> list[Path]:
    try:
        return pack_code(root, exclude)
    except ArtifactError as error:
        raise errors.InvalidArgument(error.message, reason=error.reason, hint=error.hint) from None
    except OSError as error:
        raise errors.InvalidArgument(
            f"code.path: {root}: {error.strerror}",
            reason="CodeUnreadable",
            hint="relative paths start at the folder of the document",
        ) from None
