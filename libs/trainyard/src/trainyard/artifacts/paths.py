"""Which paths a tree may hold. Both the store and every client check them, so that neither has to trust the other.

A path is relative and "/"-separated. A link's target climbs only at its start ("../../x"): a ".." behind a name could
leave the tree when that name is itself a link.
"""

from __future__ import annotations

from trainyard.artifacts.errors import UnsafePath

MAX_PATH_BYTES = 4095  # what the system takes in one call, without the NUL
MAX_NAME_BYTES = 255
_FORBIDDEN = {"\0": "a NUL", "\\": "a backslash", "\n": "a line end", "\r": "a line end"}


def check_path(path: str) -> None:
    """Refuses a path that is not relative, normalised and portable.

    Raises:
        UnsafePath: with the path and what is wrong with it.
    """
    _check_text(path)
    if path.startswith("/"):
        raise UnsafePath(f"path {path!r} is absolute", hint="give it relative to the root of the tree")
    for part in path.split("/"):
        if part in ("", ".", ".."):
            raise UnsafePath(
                f"path {path!r} is not normalised: it has the part {part!r}", hint="write it without '', '.' and '..'"
            )
        if len(part.encode()) > MAX_NAME_BYTES:
            raise UnsafePath(f"a name in path {path!r} is longer than {MAX_NAME_BYTES} bytes", hint="shorten it")


def check_link(path: str, target: str) -> None:
    """Refuses a symbolic link at `path` whose target could be outside of the tree.

    Raises:
        UnsafePath: with the link and what is wrong with it.
    """
    hint = "point it inside the tree with a relative path, or leave it out"
    _check_text(target)
    if target.startswith("/"):
        raise UnsafePath(f"link {path!r} points to the absolute path {target!r}", hint=hint)
    parts = target.split("/")
    climbs = 0
    while climbs < len(parts) and parts[climbs] == "..":
        climbs += 1
    if climbs > path.count("/"):
        raise UnsafePath(f"link {path!r} points out of the tree, to {target!r}", hint=hint)
    if any(part in ("", ".", "..") for part in parts[climbs:]) and target != ".":
        raise UnsafePath(f"the target {target!r} of link {path!r} is not normalised", hint=hint)


def escaped(path: str) -> str:
    """A path of this machine as text: bytes that are not UTF-8 as `\\xff`, and all other characters as they are."""
    return path.encode(errors="surrogateescape").decode(errors="backslashreplace")


def _check_text(path: str) -> None:
    if not path:
        raise UnsafePath("a path is empty", hint="every entry needs a name")
    for character, name in _FORBIDDEN.items():
        if character in path:
            raise UnsafePath(f"path {path!r} holds {name}", hint="rename the file")
    try:
        size = len(path.encode())
    except UnicodeEncodeError:
        hint = "rename the file, or leave it out"
        raise UnsafePath(f"the path '{escaped(path)}' is not valid UTF-8", hint=hint) from None
    if size > MAX_PATH_BYTES:
        raise UnsafePath(f"path {path[:60]!r}... is longer than {MAX_PATH_BYTES} bytes", hint="shorten it")
