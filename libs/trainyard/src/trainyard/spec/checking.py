"""Finds every problem of a document that could be read."""

from __future__ import annotations

import difflib
import json
import re
from typing import Any

from pydantic import ValidationError

from trainyard.credentials import has_credentials, named_like_a_credential
from trainyard.source import redacted
from trainyard.spec.explain import MISSING, TOO_FEW, UNKNOWN, Finding, describe, explain, kind_of
from trainyard.spec.model import API_VERSION, KIND, TrainingJob
from trainyard.spec.problems import Path, Problem, field_path
from trainyard.spec.schema import closed_schema
from trainyard.spec.scripts import check_script
from trainyard.spec.yaml_reader import Tree

HEAD = {"apiVersion": API_VERSION, "kind": KIND}
_SHOWN = 200  # characters of an offending value
_UNUSABLE = re.compile("[\0\ud800-\udfff]")
_LEAVE_OUT = "a value, or no such key"


class Checker:
    """Checks one document; `problems` has what was found."""

    def __init__(self, tree: Tree, filename: str) -> None:
        self.problems: list[Problem] = []
        self._tree = tree
        self._file = filename
        self._at: set[Path] = set()

    def check(self) -> TrainingJob | None:
        """The job, or None when anything at all is wrong with it."""
        for path, line, first in self._tree.doubled:
            self._add((path, f"given twice, first on line {first}", "each key once", ""), line=line)
        data = self._cleaned(self._tree.data, ())
        if not isinstance(data, dict):
            message = "the document is empty" if data is None else f"the document is {kind_of(data)}"
            self._add(((), message, describe(closed_schema()), ""))
            return None
        self._check_head(data)
        job = self._validated(data) if self._is_meant_as_job(data) else None
        if job is not None and (finding := check_script(job.spec)) is not None:
            self._add(finding)
        return None if self.problems else job

    def _cleaned(self, value: Any, path: Path) -> Any:
        """The value without what no field may hold, each reported: keys without a value, texts no process can get."""
        if isinstance(value, dict):
            below = {key: self._cleaned(item, (*path, key)) for key, item in value.items()}
            return {key: item for key, item in below.items() if item is not None or self._refuse_empty((*path, key))}
        if isinstance(value, list):
            return [self._cleaned(item, (*path, index)) for index, item in enumerate(value)]
        if isinstance(value, str) and _UNUSABLE.search(value):
            self._add((path, "has a character that no text can hold", "text without \\0 and lone surrogates", ""))
            return _UNUSABLE.sub("?", value)
        return value

    def _refuse_empty(self, path: Path) -> bool:
        suggestion = '""' if path[:2] == ("spec", "env") else ""
        self._add((path, "has no value", _LEAVE_OUT, suggestion))
        return False

    def _check_head(self, data: dict[str, Any]) -> None:
        for key, value in HEAD.items():
            if key not in data and (key,) not in self._at:
                self._add(((key,), MISSING, value, f"{key}: {value}"))

    def _is_meant_as_job(self, data: dict[str, Any]) -> bool:
        """Another kind of document has one problem, not one for each of its fields."""
        kind = data.get("kind", KIND)
        if not isinstance(kind, str) or difflib.get_close_matches(kind.lower(), [KIND.lower()]):
            return True
        self._add((("kind",), "not a kind this yard knows", KIND, ""))
        return False

    def _validated(self, data: dict[str, Any]) -> TrainingJob | None:
        try:
            return TrainingJob.from_json(json.dumps(data))
        except ValidationError as error:
            spelling = self._tree.spelling
            found = [each for detail in error.errors() for each in explain(detail, spelling.get(tuple(detail["loc"])))]
        known = frozenset(self._at)  # a key without a value was reported, and is not missing as well
        for finding in _without_consequences(found):
            if finding[0] not in known:
                self._add(finding)
        return None

    def _add(self, finding: Finding, line: int = 0) -> None:
        path, message, allowed, suggestion = finding
        self._at.add(path)
        public = not (path and named_like_a_credential(str(path[-1])))
        self.problems.append(
            Problem(
                file=self._file,
                line=line or self._tree.line_of(path),
                field=field_path(path),
                value=self._shown(path) if public else "",
                message=message,
                allowed=allowed,
                suggestion=suggestion if public else "",
            )
        )

    def _shown(self, path: Path) -> str:
        """The offending value as the document writes it, shortened, and without what looks like credentials."""
        if path in self._tree.spelling:
            return self._tree.spelling[path]
        value = self._tree.data
        for part in path:
            try:
                value = value[part]
            except (KeyError, IndexError, TypeError):
                return ""
        public = _masked(value)
        text = public if isinstance(public, str) else redacted(json.dumps(public, ensure_ascii=False))
        return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _masked(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: "..." if named_like_a_credential(str(key)) else _masked(item) for key, item in value.items()}
    if isinstance(value, str):
        public = redacted(value)
        return "..." if has_credentials(public) else public
    return [_masked(item) for item in value] if isinstance(value, list) else value


def _without_consequences(found: list[Finding]) -> list[Finding]:
    """A misspelled key is not also a missing one; a list whose items are wrong is not also too short."""
    meant = {(*path[:-1], suggestion) for path, message, _, suggestion in found if message == UNKNOWN}
    around = {path[:length] for path, *_ in found for length in range(len(path))}
    consequences = {MISSING: meant, TOO_FEW: around}
    return [finding for finding in found if finding[0] not in consequences.get(finding[1], ())]
