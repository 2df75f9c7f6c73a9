"""Where a job writes its results. What is there before its workers ran is none of its results.

The standard library alone: clients pack code by it, and agents unpack code by it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePath, PurePosixPath
from typing import Self

_ROOT = PurePosixPath(".")


@dataclass(frozen=True, slots=True)
class ResultPaths:
    """Files and folders below the workers' folder.

    Args:
        paths: of outputs and checkpoints. The workers' folder itself is not among them: its code is in it.
        top_level: glob of entries of the workers' folder; "" for none.
    """

    paths: tuple[PurePosixPath, ...] = ()
    top_level: str = ""

    @classmethod
    def of(cls, outputs: Iterable[str], checkpoints: str | None = None, pattern: str = "") -> Self:
        """The paths of a job.

        Args:
            outputs: `spec.outputs[].path`.
            checkpoints: `spec.checkpoints.path`; None when the job has none.
            pattern: `spec.checkpoints.pattern`; where checkpoints are in the workers' folder itself, only what it
                names counts.
        """
        folder = None if checkpoints is None else PurePosixPath(checkpoints)
        paths = {PurePosixPath(path) for path in outputs} | ({folder} if folder is not None else set())
        return cls(tuple(sorted(paths - {_ROOT})), pattern.replace("{step}", "[0-9]*") if folder == _ROOT else "")

    def place_of(self, path: PurePath) -> PurePosixPath | None:
        """The path of results that a path is, or is below; None when it is no result."""
        pure = PurePosixPath(path.as_posix())
        for place in self.paths:
            if pure.is_relative_to(place):
                return place
        if self.top_level and pure.parts and fnmatchcase(pure.parts[0], self.top_level):
            return PurePosixPath(pure.parts[0])
        return None

    def present(self, root: Path) -> list[PurePosixPath]:
        """Paths of results that are there below the workers' folder `root`."""
        found = [place for place in self.paths if (root / place).exists() or (root / place).is_symlink()]
        if self.top_level:
            names = (path.name for path in root.iterdir())
            found += [PurePosixPath(name) for name in sorted(names) if fnmatchcase(name, self.top_level)]
        return found


NO_RESULTS = ResultPaths()
