"""What can be submitted: a file, a text, a mapping, a `TrainingJob`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from trainyard.errors import InvalidArgument, InvalidSpec

if TYPE_CHECKING:
    from trainyard_protos.v1 import scheduler_pb2 as pb

MAX_BYTES = 1024 * 1024


@runtime_checkable
class Model(Protocol):
    """A `TrainingJob`, without importing what it is made of."""

    def to_json(self) -> str: ...


Source = str | Path | Mapping[str, object] | Model


@dataclass(frozen=True, slots=True)
class Document:
    """A document as it is sent, and the folder its relative paths start from."""

    text: str
    filename: str
    folder: Path

    def message(self) -> pb.Document:
        """As it is sent. Imported late: `yard run` reads the document before it needs gRPC."""
        from trainyard_protos.v1 import scheduler_pb2 as pb

        filename = self.filename.encode(errors="surrogateescape").decode(errors="backslashreplace")
        return pb.Document(text=self.text, filename=filename)


def document(source: Source) -> Document:
    """Turns what a caller has into a document.

    A `str` with a line break, or that starts with "{", is the text itself; any other `str` names a file.

    Raises:
        InvalidArgument: the file cannot be read, is not text or is larger than 1 MiB.
    """
    if isinstance(source, Mapping):
        return Document(json.dumps(source), "", Path.cwd())
    if isinstance(source, Model):
        return Document(source.to_json(), "", Path.cwd())
    if isinstance(source, str) and ("\n" in source or source.lstrip().startswith("{")):
        return Document(source, "", Path.cwd())
    return _read(Path(source))


def changed(
    document: Document,
    *,
    name: str = "",
    assignments: Sequence[str] = (),
    env: Sequence[str] = (),
    arguments: Sequence[str] = (),
) -> Document:
    """The document with what a command line says in place of, or beside, its own; itself when that is nothing.

    Args:
        name: of the job.
        assignments: `spec.field=value`, where the value is YAML.
        env: `KEY=VALUE`.
        arguments: appended to `spec.command`.

    Raises:
        InvalidSpec: an option or the result is wrong; problems name the option, or the line of the file.
    """
    if not (name or assignments or env or arguments):
        return document
    from trainyard.spec import SpecError
    from trainyard.spec.overrides import load_with, overrides

    try:
        changes = overrides(name=name, assignments=assignments, env=env, arguments=arguments)
        job = load_with(document.text, document.filename, changes)
    except SpecError as error:
        raise InvalidSpec(str(error), problems=error.problems) from None
    return replace(document, text=job.to_json())


def _read(path: Path) -> Document:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise InvalidArgument(
            f"{path}: {error.strerror}", reason="FileUnreadable", hint="give the path of a job file"
        ) from error
    if len(data) > MAX_BYTES:
        raise InvalidArgument(f"{path}: larger than 1 MiB", reason="DocumentTooLarge", hint="is it a job file?")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        where = data.count(b"\n", 0, error.start) + 1
        raise InvalidArgument(
            f"{path}:{where}: not UTF-8 text", reason="NotText", hint="a job file is YAML or JSON"
        ) from error
    return Document(text, str(path), path.absolute().parent)
