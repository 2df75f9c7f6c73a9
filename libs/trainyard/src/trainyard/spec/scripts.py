"""Which file a command runs, and whether it will be there: a missing script is told before a job waits for its turn."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Sequence
from posixpath import basename, normpath

from trainyard.spec.model import Spec

_PYTHON = re.compile(r"python[0-9.]*")
_SHELLS = frozenset({"sh", "bash", "dash", "zsh"})
_LAUNCHERS = frozenset({"torchrun", "deepspeed", "accelerate"})
_ENDINGS = (".py", ".sh")
_TAKE_A_VALUE = frozenset({"-X", "-W", "--check-hash-based-pycs"})  # of Python's options

Finding = tuple[tuple[str | int, ...], str, str, str]
"""Path in the document, what is wrong, what is allowed, what was probably meant."""


def script_of(command: Sequence[str]) -> int | None:
    """The place in a command of the script that it runs, relative to the job's folder; None when it names none."""
    program = basename(command[0])
    if _PYTHON.fullmatch(program):
        return _relative(command, _first_argument(command, _TAKE_A_VALUE, ends_at=("-c", "-m", "-")))
    if program in _SHELLS:
        plain = all(not word.startswith(("-", "+")) for word in command[1:2])
        return _relative(command, 1) if plain else None
    if program in _LAUNCHERS:
        if "-m" in command or "--module" in command:
            return None
        return _relative(command, next((i for i, word in enumerate(command) if word.endswith(".py")), None))
    is_script = program.endswith(_ENDINGS) or "/" in command[0]
    return _relative(command, 0) if is_script else None


def _first_argument(command: Sequence[str], with_value: frozenset[str], ends_at: Sequence[str]) -> int | None:
    place = 1
    while place < len(command) and command[place].startswith("-"):
        if command[place].startswith(tuple(ends_at[:2])) or command[place] in ends_at:
            return None
        place += 2 if command[place] in with_value else 1
    return place


def _relative(command: Sequence[str], place: int | None) -> int | None:
    """The place, unless the script is absolute or leads out of the job's folder."""
    if place is None or place >= len(command):
        return None
    script = normpath(command[place])
    return None if script.startswith(("/", "..", "~")) or script == "." else place


def check_script(spec: Spec, files: Iterable[str] | None = None) -> Finding | None:
    """What is wrong with the script that a job's command runs; None when nothing is, or nobody can know yet.

    Args:
        spec: of the job.
        files: paths of the files in the job's code; None when they are not known here.
    """
    command = spec.command
    place = script_of(command)
    if place is None:
        return None
    script = normpath(command[place])
    if files is None:
        if spec.code is not None or spec.inputs or spec.image is not None:
            return None
        message = f"'{script}' will not be there: the job has no code and no inputs"
        return ("spec", "command", place), message, "a script below code.path, or an absolute path", "code: {path: .}"
    if any(_is_below(script, normpath(entry.path)) for entry in spec.inputs):
        return None
    known = sorted(files)
    if f"{script}/__main__.py" in known and _PYTHON.fullmatch(basename(command[0])):
        return None
    if script not in known:
        message = f"'{script}' is not among the files of the job's code"
        return ("spec", "command", place), message, _allowed(known), _meant(spec, place, script, known)
    if spec.runtime == "process" and place == 0 and "/" not in command[0]:
        message = f"'{script}' is a file of the job's code, and no program on PATH"
        return ("spec", "command", place), message, "a program, then its arguments", _corrected(spec, place, script)
    return None


def _is_below(path: str, folder: str) -> bool:
    return folder == "." or path == folder or path.startswith(f"{folder}/")


def _allowed(files: Sequence[str]) -> str:
    scripts = [name for name in files if name.endswith(_ENDINGS)][:5]
    return f"a path below code.path, such as {', '.join(scripts)}" if scripts else "a path below code.path"


def _meant(spec: Spec, place: int, script: str, files: Sequence[str]) -> str:
    ending = basename(script).rpartition(".")[2]
    alike = [name for name in files if name.endswith(f".{ending}")]
    found = [name for name in alike if basename(name) == basename(script)]
    found = found or difflib.get_close_matches(script, alike, n=1)
    return _corrected(spec, place, found[0]) if found else ""


def _corrected(spec: Spec, place: int, script: str) -> str:
    """The whole command with the script in its place, run by its interpreter where the command named none."""
    command = list(spec.command)
    command[place : place + 1] = [script]
    if place == 0 and "/" not in spec.command[0] and spec.runtime == "process":
        command.insert(0, "python" if script.endswith(".py") else "sh")
    return json.dumps(command, ensure_ascii=False)
