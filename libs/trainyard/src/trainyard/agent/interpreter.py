"""What Python the workers run: its version and packages, read from its folders. Starting it would cost them time."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

_PACKAGES = ("lib/python3*/site-packages", "lib/python3*/dist-packages", "local/lib/python3*/dist-packages")
_INFO = ".dist-info"
_PYTHON = re.compile(r"python[0-9.]*")
_DEFAULTS = ("python", "python3")  # images of Debian have the second one alone


def interpreter(program: str, folders: Iterable[str], cwd: str) -> dict[str, Any]:
    """Version and packages of the Python that runs a command; {} when there is none.

    Args:
        program: the first word of the command. One that is no Python runs the first one in `folders`.
        folders: as PATH lists them, the first one first.
        cwd: where relative paths start.

    Raises:
        OSError: its folders cannot be read.
    """
    python = _find(program, folders, cwd)
    if python is None:
        return {}
    prefix = python.parent.parent
    settings = _settings(prefix)
    packages = dict(_packages(prefix))
    if settings.get("include-system-site-packages") == "true":
        packages = dict(_packages(Path(settings["home"]).parent)) | packages
    facts = {"python": _version(python, settings), "packages": dict(sorted(packages.items()))}
    return {name: fact for name, fact in facts.items() if fact}


def _find(program: str, folders: Iterable[str], cwd: str) -> Path | None:
    name = Path(program).name
    names = (name,) if _PYTHON.fullmatch(name) else _DEFAULTS
    if "/" in program and names != _DEFAULTS:
        candidates = iter([Path(cwd) / program])
    else:
        candidates = (Path(folder) / name for folder in folders if folder for name in names)
    return next((each for each in candidates if each.exists()), None)


def _version(python: Path, settings: Mapping[str, str]) -> str:
    program = python.resolve()
    if program == Path(sys.executable).resolve():
        return platform.python_version()
    return settings.get("version_info") or settings.get("version") or program.name.removeprefix("python")


def _settings(prefix: Path) -> dict[str, str]:
    """What a virtual environment says of itself; {} for an installation."""
    file = prefix / "pyvenv.cfg"
    lines = file.read_text().splitlines() if file.exists() else []
    return {name.strip(): value.strip() for name, _, value in (line.partition("=") for line in lines)}


def _packages(prefix: Path) -> Iterator[tuple[str, str]]:
    for pattern in _PACKAGES:
        for folder in prefix.glob(pattern):
            for entry in os.listdir(folder):  # noqa: PTH208 - names are all that is needed
                if entry.endswith(_INFO):
                    name, _, version = entry.removesuffix(_INFO).rpartition("-")
                    yield name.replace("_", "-").lower(), version
