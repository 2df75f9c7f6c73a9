"""What Python the workers run: its version and packages, read from its folders. Starting it would cost them time."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

_PACKAGES = ("lib/python3*/site-packages", "lib/python3*/dist-packages", "local/lib/python3*/dist-packages")
_INFO = ".dist-info"


def interpreter(folders: Iterable[str]) -> dict[str, Any]:
    """Version and packages of the first `python` in these folders; {} when none has one.

    Args:
        folders: as PATH lists them, the first one first.

    Raises:
        OSError: its folders cannot be read.
    """
    found = next((Path(folder) for folder in folders if folder and (Path(folder) / "python").exists()), None)
    if found is None:
        return {}
    settings = _settings(found.parent)
    packages = dict(_packages(found.parent))
    if settings.get("include-system-site-packages") == "true":
        packages = dict(_packages(Path(settings["home"]).parent)) | packages
    facts = {"python": _version(found, settings), "packages": dict(sorted(packages.items()))}
    return {name: fact for name, fact in facts.items() if fact}


def _version(folder: Path, settings: Mapping[str, str]) -> str:
    program = (folder / "python").resolve()
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
