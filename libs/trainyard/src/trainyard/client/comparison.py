"""What differs between runs. Pure: no yard is asked."""

from __future__ import annotations

import difflib
import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainyard_protos.v1 import artifacts_pb2

from trainyard.client.names import SYSTEM_PREFIX
from trainyard.client.records import Run
from trainyard.source import CUT_MARK

PARTS = ("params", "spec", "tags", "notes", "code", "git", "context", "metrics")
FILES = "files."
"""Names of rows of part "code" that are about one file begin with this."""
_DIGITS = 12
_INDEX = re.compile(r"^index [0-9a-f]+\.\.[0-9a-f]+.*\n", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Row:
    """One fact of all runs.

    Attributes:
        part: one of `PARTS`.
        name: dotted, for instance "spec.resources.cpu"; "" for notes.
        values: one for each run; None where a run has none.
    """

    part: str
    name: str
    values: tuple[Any, ...]

    @property
    def differs(self) -> bool:
        """Whether the runs disagree. NaN agrees with NaN."""
        return any(not _same(self.values[0], value) for value in self.values[1:])


@dataclass(frozen=True, slots=True)
class Code:
    """The artifact that a run's code is in.

    Attributes:
        artifact: its reference; "" when there is none.
        digest: of all of its files: the same for the same code, whatever the version is called; "" when not known.
        files: a digest of each file by path; {} when they were not asked for, or the version was deleted.
    """

    artifact: str = ""
    digest: str = ""
    files: Mapping[str, str] = field(default_factory=dict)


def code_of(detail: artifacts_pb2.VersionDetail) -> Code:
    """A version of code as a comparison needs it."""
    version = detail.version
    files = {file.path: _file_digest(file) for file in detail.manifest.files}
    return Code(f"{version.name}@{version.number}", version.digest.hex(), files)


def _file_digest(file: artifacts_pb2.File) -> str:
    content = "\n".join([oct(file.mode), file.symlink, *(chunk.hash.hex() for chunk in file.chunks)])
    return hashlib.sha256(content.encode()).hexdigest()[:_DIGITS]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs side by side.

    Attributes:
        runs: in the order asked for.
        rows: what differs (or everything), by part and name.
        diffs: of each run, its code against its commit; "" where there is none.
        unknown: of each run, which code was not recorded, in words; "" when all of its code was.
    """

    runs: tuple[Run, ...]
    rows: tuple[Row, ...]
    diffs: tuple[str, ...]
    unknown: tuple[str, ...] = ()

    @property
    def code_differs(self) -> bool:
        """Whether the recorded code of the runs differs."""
        return any(row.differs for row in self.rows if row.part in ("code", "git"))


def compare(
    runs: Sequence[Run], diffs: Sequence[str] = (), codes: Sequence[Code] = (), *, everything: bool = False
) -> Comparison:
    """Lays runs side by side.

    Args:
        diffs: the code of each run against its commit; default: none is known.
        codes: the artifact that the code of each run is in; default: none is known.
        everything: also what is the same, and what the agent samples.
    """
    diffs = tuple(diffs) or ("",) * len(runs)
    codes = tuple(codes) or (Code(),) * len(runs)
    facts = [
        dict([*_facts(run, diff, everything), *_code_facts(code, everything)])
        for run, diff, code in zip(runs, diffs, codes, strict=True)
    ]
    if any(code.digest for code in codes):  # the digest tells; a version's number may differ for the same code
        for each in facts:
            each.pop(_CODE_REFERENCE, None)
    keys = sorted({key for each in facts for key in each}, key=lambda key: (PARTS.index(key[0]), key[1]))
    rows = [Row(part, name, tuple(each.get((part, name)) for each in facts)) for part, name in keys]
    unknown = tuple(_unknown_code(*each) for each in zip(runs, diffs, codes, strict=True))
    return Comparison(tuple(runs), tuple(row for row in rows if everything or row.differs), diffs, unknown)


def _unknown_code(run: Run, diff: str, code: Code) -> str:
    """Returns which code of a run was not recorded; "" when an artifact or a commit with its diff has all of it."""
    if code.artifact and code.digest:
        return ""
    git = run.git
    if not git.get("commit"):
        return "modules other than the script" if code.digest else "the code, which was in no git repository"
    if git.get("dirty") and (not diff or CUT_MARK in diff):
        return "changes that were not committed"
    return "files that git does not track" if git.get("untracked") else ""


def change_between(diff: str, other: str) -> str:
    """How one diff of code differs from another, as a unified diff of the two; "" when the code is the same."""
    before, after = (_INDEX.sub("", text).splitlines() for text in (diff, other))
    return "\n".join(difflib.unified_diff(before, after, "first", "second", lineterm=""))


def flattened(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of nested mappings with dotted names. A list is one value, unless it holds mappings or lists."""
    if isinstance(value, Mapping):
        parts = [(str(key), each) for key, each in value.items()]
    elif isinstance(value, list) and any(isinstance(each, Mapping | list) for each in value):
        parts = [(str(index), each) for index, each in enumerate(value)]
    else:
        yield name, value
        return
    for key, each in parts:
        yield from flattened(each, f"{name}.{key}" if name else key)


_CODE_REFERENCE = ("spec", "code.artifact")


def _code_facts(code: Code, everything: bool) -> Iterator[tuple[tuple[str, str], Any]]:
    if everything and code.artifact:
        yield ("code", "artifact"), code.artifact
    if code.artifact or code.digest:
        yield ("code", "digest"), code.digest[:_DIGITS] or f"not known: {code.artifact} was deleted"
    for path, digest in code.files.items():
        yield ("code", f"{FILES}{path}"), digest


def _facts(run: Run, diff: str, everything: bool) -> Iterator[tuple[tuple[str, str], Any]]:
    context = dict(run.context)
    context.pop("git", None)
    context.pop("code", None)
    git = dict(run.git)
    reference = git.pop("diff_artifact", None)
    if diff:
        git["diff"] = _summary(diff)
    elif reference:
        git["diff"] = f"{reference}, which was deleted"
    shown = {name: value for name, value in run.values.items() if everything or not name.startswith(SYSTEM_PREFIX)}
    parts = {"params": run.params, "spec": run.spec, "tags": run.tags, "git": git, "context": context}
    for part, facts in parts.items():
        for name, value in flattened(facts):
            yield (part, name), value
    for name, value in shown.items():
        yield ("metrics", name), value
    if run.notes:
        yield ("notes", ""), run.notes


def _summary(diff: str) -> str:
    """For instance "2 files, +10 -3 (5f2a91c0)"; the same text for the same change alone."""
    diff = _INDEX.sub("", diff)
    lines = diff.splitlines()
    files = sum(line.startswith("diff --git ") for line in lines)
    added = sum(line.startswith("+") and not line.startswith("+++ ") for line in lines)
    removed = sum(line.startswith("-") and not line.startswith("--- ") for line in lines)
    digest = hashlib.sha256(diff.encode()).hexdigest()[:8]
    return f"{files} {'file' if files == 1 else 'files'}, +{added} -{removed} ({digest})"


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, float) and isinstance(other, float) and math.isnan(value):
        return math.isnan(other)
    return bool(value == other)
