"""Runs a script of another library as it is:

python -m trainkit.dialects run train.py --its --own --arguments
"""

from __future__ import annotations

import argparse
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from trainkit.dialects import replaced

DIALECTS = {"accmt": "trainkit.dialects.accmt"}
"""What a script imports, and what it gets."""


class Renamed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the dialect where a script imports the library."""

    def __init__(self) -> None:
        self._specs: dict[str, importlib.machinery.ModuleSpec | None] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        library = fullname.partition(".")[0]
        if library not in DIALECTS:
            return None
        found = importlib.util.find_spec(_ours(fullname))
        if found is None:
            replaced.refuse_module(DIALECTS[library], fullname)
            raise ModuleNotFoundError(f"the dialect has no module {fullname!r}", name=fullname)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=found.submodule_search_locations is not None)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        library, ours = spec.name.partition(".")[0], _ours(spec.name)
        module = importlib.import_module(ours)
        self._specs[ours] = module.__spec__
        replaced.guard(DIALECTS[library], spec.name, module)
        # Modules that the dialect loaded already get their names here. Import would set a module that it loads as an
        # attribute of its package, over a class of the same name (`accmt.tqdm`).
        for name, loaded in list(sys.modules.items()):
            if name.startswith(f"{ours}."):
                alias = spec.name + name.removeprefix(ours)
                replaced.guard(DIALECTS[library], alias, loaded)
                sys.modules.setdefault(alias, loaded)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It ran when it was imported under its own name, and keeps the spec of that import."""
        module.__spec__ = self._specs.pop(module.__name__)


def _ours(name: str) -> str:
    library, _, rest = name.partition(".")
    return DIALECTS[library] + (f".{rest}" if rest else "")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m trainkit.dialects", description=__doc__)
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run", help="run a script whose imports are another library's")
    run.add_argument("script", type=Path)
    run.add_argument("arguments", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    if not given.script.is_file():
        parser.error(f"there is no script {given.script}")
    sys.meta_path.insert(0, Renamed())
    sys.argv = [str(given.script), *given.arguments]
    sys.path.insert(0, str(given.script.resolve().parent))
    runpy.run_path(str(given.script), run_name="__main__")


if __name__ == "__main__":
    main()
