"""Which code a run is made of: the git commit of a folder and what differs from it.

The standard library and the command `git`. Asking is safe in a repository that nobody vouches for, see `gitcommand`.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from trainyard.credentials import has_credentials, looks_like_credentials
from trainyard.gitcommand import Git, GitFailed

DIFF_BYTES = 256 * 1024
"""Most bytes of a diff that are kept."""
DIFF_VARIABLE = "TRAINYARD_GIT_DIFF"
"""Environment variable: `off` leaves diffs out of every run's context."""
CUT_MARK = "... cut here: "
"""Begins the last line of a diff that was longer."""
_DEADLINE_S = 10.0
_LABEL = "git."
_LABEL_LENGTH = 240
_NAMES = 100
_ARGUMENT_BYTES = 96 * 1024
_DIFF = ("diff", "--no-ext-diff", "--no-textconv", "--no-renames", "--ignore-submodules=dirty", "--no-relative")
_SECRETS_IN_URLS = re.compile(
    r"""(?<=://)[^/\[\s"']*:[0-9]*[^0-9/\s"'][^\s"']*@"""  # also with '/' and '@' in the password
    r"""|(?<=://)[^/\s"']+@|(?<=[?])[^\s"']+"""
)
_SECRETS_WITHOUT_SCHEME = re.compile(r"[^/@:\s]+:[^/@:\s]+@(?=\S*$)")
_SCP = re.compile(r"(?:[^/@:]+@)?[^/@:]+:(?!//)")


def git_context(
    folder: Path, *, paths: Collection[str] | None = None, diff: bool | None = None, timeout_s: float = _DEADLINE_S
) -> dict[str, Any]:
    """The state of the repository that `folder` is in; {} when there is no git or no repository.

    Args:
        folder: a folder of the work tree.
        paths: the only files whose content or name may appear, relative to `folder`; None: all of the repository.
            Files that were deleted are then left out of the diff.
            What looks like credentials is never in it.
        diff: whether the diff is taken; None: unless `TRAINYARD_GIT_DIFF` says `off`.
        timeout_s: seconds that all of it may take.

    Returns:
        `commit` ("" before the first), `branch` ("" when detached), `remote` (URL without credentials), `dirty`
        (whether tracked files differ from the commit) and, where there is something to say: `diff` against the commit
        (at most `DIFF_BYTES`, then cut with a mark in its last line), `untracked` (names of files that are neither
        tracked nor ignored, at most 100 and a mark), `problem` (why something is missing).
    """
    try:
        git, top = _open(folder, time.monotonic() + timeout_s)
    except GitFailed as error:
        nothing = "not a git repository" in str(error) or str(error).startswith("git: ")
        return {} if nothing else {"problem": str(error)}
    context: dict[str, Any] = {"commit": "", "branch": "", "remote": "", "dirty": False}
    allowed = None if paths is None else _below(top, folder, paths)
    wanted = diff if diff is not None else wants_diff()
    try:
        _describe(git, context, allowed, wanted)
    except GitFailed as error:
        context["problem"] = str(error)
    return context


def wants_diff() -> bool:
    """Whether diffs are kept: unless the environment says no."""
    return os.environ.get(DIFF_VARIABLE, "").lower() not in ("off", "0", "no", "false")


def to_labels(context: Mapping[str, Any], diff: str = "") -> dict[str, str]:
    """A context as labels of the artifact that the code is packed into.

    Args:
        context: of `git_context`.
        diff: reference of the artifact that has the diff; it is too long for a label.
    """
    if "commit" not in context:
        return {}
    facts = {name: str(context[name]) for name in ("commit", "branch", "remote")}
    facts |= {"dirty": "yes" if context["dirty"] else "no", "diff": diff}
    return {f"{_LABEL}{name}": value[:_LABEL_LENGTH] for name, value in facts.items() if value}


def from_labels(labels: Mapping[str, str]) -> dict[str, Any]:
    """The context that `to_labels` put into labels, with the reference of the diff as `diff_artifact`; {} for none."""
    facts = {name.removeprefix(_LABEL): value for name, value in labels.items() if name.startswith(_LABEL)}
    if not facts:
        return {}
    context: dict[str, Any] = {name: facts.get(name, "") for name in ("commit", "branch", "remote")}
    context["dirty"] = facts.get("dirty") == "yes"
    return context | ({"diff_artifact": facts["diff"]} if "diff" in facts else {})


def without_credentials(url: str) -> str:
    """The URL of a remote without user, password and query; "" for what is no URL that one could fetch from again.

    The user of an ssh address stays: it is part of the address and no secret.
    """
    if _SCP.match(url) or "://" not in url:
        return "" if "::" in url or has_credentials(url) else url
    try:
        parts = urlsplit(url)
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        return ""
    if "::" in parts.scheme or not parts.hostname:
        return url if parts.scheme == "file" else ""
    user = f"{parts.username}@" if parts.username and "ssh" in parts.scheme else ""
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return urlunsplit((parts.scheme, f"{user}{host}{port}", parts.path, "", ""))


def redacted(text: str) -> str:
    """A text for others to read, without users, passwords and queries of the URLs in it."""
    if "://" not in text:
        return text[match.end() :] if (match := _SECRETS_WITHOUT_SCHEME.match(text)) else text
    return _SECRETS_IN_URLS.sub("", text)


def _open(folder: Path, give_up: float) -> tuple[Git, Path]:
    """Git at the top of the work tree, without the filters that its configuration names."""
    here = Git(folder, give_up)
    up = here.run("rev-parse", "--show-cdup")[:-1]
    top = folder.resolve() / os.fsdecode(up)
    names = (key for key, _ in _configuration(here))
    return Git(top, give_up).with_settings(_unfiltered(names)), top.resolve()


def _unfiltered(keys: Iterator[str]) -> list[tuple[str, str]]:
    drivers = {key.rpartition(".")[0] for key in keys if key.startswith("filter.")}
    return [
        (f"{driver}.{setting}", value)
        for driver in sorted(drivers)
        for setting, value in (("clean", ""), ("smudge", ""), ("process", ""), ("required", "false"))
    ]


def _configuration(git: Git) -> Iterator[tuple[str, str]]:
    for entry in git.run("config", "--list", "-z").decode(errors="surrogateescape").split("\0"):
        key, _, value = entry.partition("\n")
        yield key, value


def _below(top: Path, folder: Path, paths: Collection[str]) -> frozenset[str]:
    """The paths, relative to the top of the work tree."""
    prefix = folder.resolve().relative_to(top)
    return frozenset((prefix / path).as_posix() for path in paths)


def _describe(git: Git, context: dict[str, Any], allowed: frozenset[str] | None, wants_diff: bool) -> None:
    context["branch"] = _optional(git, "symbolic-ref", "--quiet", "--short", "HEAD")
    context["remote"] = without_credentials(_remote(git))
    context["commit"] = _optional(git, "rev-parse", "--verify", "--quiet", "HEAD^{commit}")
    if context["commit"]:
        changed = _changed(git)
        context["dirty"] = bool(changed)
        if changed and wants_diff and (text := _diff(git, changed, allowed)):
            context["diff"] = text
    if untracked := _untracked(git, allowed):
        context["untracked"] = untracked


def _optional(git: Git, *arguments: str) -> str:
    """What a command prints; "" when it answers no."""
    try:
        return git.run(*arguments).decode(errors="replace").strip()
    except GitFailed:
        if time.monotonic() > git.give_up:
            raise
        return ""


def _remote(git: Git) -> str:
    """The URL of `origin`, else of the first remote."""
    urls = {key: value for key, value in _configuration(git) if re.fullmatch(r"remote\..*\.url", key, re.DOTALL)}
    return urls.get("remote.origin.url") or next(iter(urls.values()), "")


def _changed(git: Git) -> list[tuple[str, str]]:
    """State (a letter) and name of each tracked file that differs from the commit."""
    fields = os.fsdecode(git.run(*_DIFF, "--name-status", "-z", "HEAD")).split("\0")
    return list(zip(fields[0::2], fields[1::2], strict=False))


def _diff(git: Git, changed: Sequence[tuple[str, str]], allowed: frozenset[str] | None) -> str:
    names = [name for state, name in changed if allowed is None or (state != "D" and name in allowed)]
    public = [name for name in names if not looks_like_credentials(git.folder, PurePosixPath(name))]
    if not public:
        return ""
    # Without names, git shows all that changed, however many there are.
    names = [] if allowed is None and public == names else public
    shown = list(_fitting(names))
    shape = ("--no-color", "--src-prefix=a/", "--dst-prefix=b/", "--unified=3")
    data = git.beginning(DIFF_BYTES + 1, *_DIFF, *shape, "HEAD", "--", *shown)
    cut = len(data) > DIFF_BYTES or len(shown) < len(names)
    if cut:
        data = data[: data.rfind(b"\n", 0, DIFF_BYTES) + 1]
    mark = f"{CUT_MARK}only the first {DIFF_BYTES // 1024} KiB are kept\n" if cut else ""
    return data.decode(errors="replace") + mark


def _fitting(names: Sequence[str]) -> Iterator[str]:
    """As many names as a command line takes."""
    room = _ARGUMENT_BYTES
    for name in names:
        room -= len(os.fsencode(name)) + 1
        if room < 0:
            return
        yield name


def _untracked(git: Git, allowed: frozenset[str] | None) -> list[str]:
    listed = os.fsdecode(git.run("ls-files", "--others", "--exclude-standard", "-z")).split("\0")[:-1]
    names = [name for name in listed if allowed is None or name in allowed]
    shown = [name.encode(errors="replace").decode() for name in names[:_NAMES]]
    return [*shown, f"... and {len(names) - _NAMES} more"] if len(names) > _NAMES else shown
