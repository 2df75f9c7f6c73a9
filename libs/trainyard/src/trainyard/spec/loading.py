"""A document's text to a `TrainingJob`, or to everything that is wrong with it.

JSON that is right takes a short way. Everything else is read with the line of each value, so that problems can be shown
where they are.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from trainyard.spec.model import TrainingJob
from trainyard.spec.problems import Problem, SpecError, field_path
from trainyard.spec.scripts import check_script

if TYPE_CHECKING:
    from trainyard.spec.yaml_reader import Tree

MAX_BYTES = 1 << 20
_DOUBTFUL_ESCAPE = re.compile(r"\\u(0000|[dD][89a-fA-F])")  # NUL and halves of pairs
_HEAD = ("apiVersion", "kind")


def load(text: str | bytes, filename: str = "") -> TrainingJob:
    """Reads a document in YAML or JSON.

    Args:
        text: the document; bytes have to be UTF-8.
        filename: how problems name the document.

    Raises:
        SpecError: with every problem of the document at once.
    """
    decoded = _decode(text, filename)
    job = _load_json(decoded) if decoded.lstrip().startswith("{") else None
    return job or _load_any(decoded, filename)


def _decode(text: str | bytes, filename: str) -> str:
    size = len(text) if isinstance(text, bytes) or len(text) > MAX_BYTES else len(text.encode("utf-8", "replace"))
    if size > MAX_BYTES:
        raise _single(filename, message=f"larger than {MAX_BYTES >> 20} MiB", allowed="a document of at most 1 MiB")
    if isinstance(text, str):
        return text.removeprefix("\ufeff")
    try:
        return text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = text.count(b"\n", 0, error.start) + 1
        raise _single(
            filename, line=line, message="not a text file in UTF-8", allowed="YAML or JSON in UTF-8"
        ) from None


def _single(filename: str, **fields: Any) -> SpecError:
    return SpecError([Problem(file=filename, **fields)])


class _Doubtful(Exception):
    """JSON that needs a closer look."""


def _load_json(text: str) -> TrainingJob | None:
    """The job, when the text is JSON without any problem."""
    try:
        head = json.loads(text, object_pairs_hook=_plain_object)
        job = TrainingJob.from_json(text) if all(key in head for key in _HEAD) and _is_clean(text) else None
        return job if job is not None and check_script(job.spec) is None else None
    except (ValueError, _Doubtful, RecursionError):
        return None


def _plain_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs) or None in entries.values():
        raise _Doubtful
    return entries


def _is_clean(text: str) -> bool:
    return "\0" not in text and not _DOUBTFUL_ESCAPE.search(text)


def _load_any(text: str, filename: str) -> TrainingJob:
    from trainyard.spec.checking import Checker  # here, because JSON that is right does without ruamel

    checker = Checker(read(text, filename), filename)
    job = checker.check()
    if job is None:
        raise SpecError(checker.problems)
    return job


def read(text: str, filename: str = "") -> Tree:
    """Reads a document as data, with the lines of its values; nothing of it is checked.

    Raises:
        SpecError: the text is neither YAML nor JSON.
    """
    from trainyard.spec.yaml_reader import Tree, Unreadable, read_yaml

    text = _decode(text, filename)
    try:
        data = json.loads(text) if text.lstrip().startswith("{") else None
    except (ValueError, RecursionError):
        data = None
    try:
        tree = read_yaml(text)
    except Unreadable as error:
        if data is not None and error.syntax:
            return Tree(data)  # JSON may be what YAML may not: tabs, for one
        field = field_path(error.path)
        raise _single(
            filename, line=error.line, field=field, value=error.value, message=error.message, allowed=error.allowed
        ) from None
    if data is not None:
        tree.data = data
    return tree
