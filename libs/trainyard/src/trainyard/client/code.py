"""Packing the folder `code.path` of a document into an artifact."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainyard import errors
from trainyard.artifacts import ArtifactError, CodeFiles, pack_code
from trainyard.client.connection import Connection
from trainyard.client.documents import Document
from trainyard.client.names import DIFF_FILE
from trainyard.client.transfer import upload_files
from trainyard.results import ResultPaths
from trainyard.source import git_context, to_labels

if TYPE_CHECKING:
    from trainyard.spec import Spec, TrainingJob

logger = logging.getLogger(__name__)
_SHOWN = 5


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


def code_files(document: Document, job: TrainingJob) -> tuple[Path, CodeFiles] | None:
    """The folder `code.path` and what of it a submission packs; None when the document has none.

    Raises:
        InvalidSpec: the script that the command runs is not packed.
        InvalidArgument: the folder is missing, too large, or holds what cannot be stored.
    """
    code = job.spec.code
    if code is None or code.path is None:
        return None
    root = document.folder / code.path
    files = _files(root, code.exclude, results_of(job.spec))
    _check_script(document, job.spec, files)
    return root, files


async def pack(connection: Connection, document: Document, workspace: str) -> str:
    """Stores the folder `code.path` of the document; returns a reference to exactly that version.

    What git knows about the folder goes into the version's labels; the diff of what is packed, which can be long, is an
    artifact of its own, named in a label. What no pattern leaves out and is not packed all the same is logged as a
    warning: see `left_out`.

    Raises:
        InvalidSpec: the document is wrong.
        InvalidArgument: the folder is missing, too large, or holds what cannot be stored.
    """
    job = resolved(document)
    found = await asyncio.to_thread(code_files, document, job)
    if found is None:
        raise errors.InvalidArgument("the document has no 'code.path' to pack", reason="NoCode")
    root, files = found
    # Who has set up no logging reads a warning on stderr, users of the command line among them.
    for note in left_out(files, results_of(job.spec)):
        logger.warning(note)
    labels = await _source(connection, root, files.packed, workspace, f"{job.metadata.name}-diff")
    name = f"{job.metadata.name}-code"
    version = await upload_files(connection, root, files.packed, workspace, name, kind="code", labels=labels)
    return f"{version.name}@{version.number}"


def _check_script(document: Document, spec: Spec, files: CodeFiles) -> None:
    """Raises InvalidSpec when the script that the command runs is not packed."""
    from trainyard.spec.problems import Problem, SpecError, field_path
    from trainyard.spec.scripts import check_script

    finding = check_script(spec, [path.as_posix() for path in files.packed])
    if finding is not None:
        path, message, allowed, suggestion = finding
        problem = Problem(document.filename, 0, field_path(path), "", message, allowed, suggestion)
        raise errors.InvalidSpec(str(SpecError([problem])), problems=[problem])


def left_out(files: CodeFiles, results: ResultPaths) -> Iterator[str]:
    """What to tell about files that are not packed although no pattern leaves them out."""
    if files.results:
        # Names of files are anybody's: repr() keeps them from driving a terminal.
        counts = Counter(str(results.place_of(path)) for path in files.results)
        places = [f"{place!r} ({count} {'file' if count == 1 else 'files'})" for place, count in counts.items()]
        yield (
            f"not packed: {_listed(places)}: the job writes "
            "its outputs or checkpoints there, and files of an earlier run are none of its results. If the job needs "
            "them, store them with 'yard artifacts put' and name the artifact in spec.inputs, with another path"
        )
    if files.credentials:
        yield (
            f"not packed: {_listed([repr(path.as_posix()) for path in files.credentials])}: looks like credentials, "
            "which are not stored with code. Give them to the job with spec.secrets"
        )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def results_of(spec: Spec) -> ResultPaths:
    checkpoints = spec.checkpoints
    return ResultPaths.of(
        [output.path for output in spec.outputs],
        checkpoints.path if checkpoints else None,
        checkpoints.pattern if checkpoints else "",
    )


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


def _files(root: Path, exclude: Sequence[str], results: ResultPaths) -> CodeFiles:
    try:
        return pack_code(root, exclude, results=results)
    except ArtifactError as error:
        raise errors.InvalidArgument(error.message, reason=error.reason, hint=error.hint) from None
    except OSError as error:
        raise errors.InvalidArgument(
            f"code.path: {root}: {error.strerror}",
            reason="CodeUnreadable",
            hint="relative paths start at the folder of the document",
        ) from None
