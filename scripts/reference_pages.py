"""Writes the generated pages of docs/reference, or with --check says which of them are out of date."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import settings_page
import trainkit_page
from trainyard.cli import reference as commands
from trainyard.spec import reference, schema

PAGES: dict[str, Callable[[], str]] = {
    "cli.md": commands.page,
    "settings.md": settings_page.page,
    "spec.md": reference.page,
    "trainkit.md": trainkit_page.page,
    "trainingjob.schema.json": lambda: json.dumps(schema.json_schema(), indent=2, ensure_ascii=False) + "\n",
}


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        (folder / name).write_text(page(), encoding="utf-8")


def outdated(folder: Path) -> list[str]:
    """The pages that are missing or differ from what the sources say."""
    return [name for name, page in PAGES.items() if not _is(folder / name, page())]


def _is(file: Path, text: str) -> bool:
    return file.is_file() and file.read_text(encoding="utf-8") == text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--check", action="store_true", help="change nothing; fail when a page is out of date")
    options = parser.parse_args()
    if not options.check:
        write(options.folder)
        return 0
    stale = outdated(options.folder)
    for name in stale:
        print(f"docs/reference/{name} is out of date: run scripts/docs and commit the result", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
