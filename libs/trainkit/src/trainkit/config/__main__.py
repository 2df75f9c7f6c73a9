"""`python -m trainkit.config`: checks files and prints the JSON Schema, without importing torch."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

from trainkit.config import ConfigError, RunConfig, load, schema

WRONG = 2


def main(arguments: list[str] | None = None) -> int:
    """The command. Returns 0, or 2 when a file or an argument is wrong."""
    parser = argparse.ArgumentParser(prog="python -m trainkit.config", description="Checks the configuration of a run.")
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="says everything that is wrong with files")
    check.add_argument("files", nargs="+", metavar="FILE")
    show = commands.add_parser("schema", help="prints the JSON Schema for editors")
    for each in (check, show):
        each.add_argument(
            "--class", dest="type", metavar="MODULE:CLASS", help="dataclass of the program's own settings"
        )
    given = parser.parse_args(arguments)
    try:
        type_ = _class(given.type)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201 - a command's output
        return WRONG
    if given.command == "schema":
        print(json.dumps(schema(type_), indent=2))  # noqa: T201
        return 0
    return max(_check(file, type_) for file in given.files)


def _check(file: str, type_: type) -> int:
    try:
        load(file, type_)
    except ConfigError as error:
        for problem in error.problems:
            print(problem, file=sys.stderr)  # noqa: T201
        return WRONG
    print(f"{file}: good")  # noqa: T201
    return 0


def _class(name: str | None) -> type:
    if name is None:
        return RunConfig
    module, _, attribute = name.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--class {name}: {error}; give it as MODULE:CLASS") from None
    if not isinstance(found, type):
        raise ValueError(f"--class {name}: is not a class")
    return found


if __name__ == "__main__":
    sys.exit(main())
