"""What of a folder is code: everything but what `.gitignore` and `.yardignore` leave out.

Both files work as in git, in every folder, deeper ones first; `.yardignore` comes after `.gitignore` and can take back
what that left out. `exclude` patterns come last and cannot be taken back. Parents' `.gitignore` files count up to the
root of the repository. `.git`, `__pycache__`, `.venv` and the yard's home are never code, nor is what looks like
credentials, nor what lies where the job writes its results: files of an earlier run would come back as those of a job
that wrote none. No ignore file takes these back.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainyard.artifacts.errors import TreeTooLarge, UnsafePath
from trainyard.artifacts.paths import check_link, check_path
from trainyard.credentials import looks_like_credentials
from trainyard.home import home
from trainyard.results import NO_RESULTS, ResultPaths

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

MAX_CODE_BYTES = 256 * 1024 * 1024
MAX_CODE_FILES = 20_000
NEVER = frozenset({".git", "__pycache__", ".venv"})
IGNORE_FILES = (".gitignore", ".yardignore")


@dataclass(frozen=True, slots=True)
class _Rules:
    """Patterns of one ignore file, which hold below the folder it is in."""

    folder: Path
    spec: GitIgnoreSpec

    def verdict(self, path: Path, is_folder: bool) -> bool | None:
        """True: leave it out; False: take it back; None: nothing said."""
        relative = path.relative_to(self.folder).as_posix()
        # Patterns are matched in UTF-8. A name that is none is read as the ignore file is: with U+FFFD for odd bytes.
        text = relative.encode(errors="surrogateescape").decode(errors="replace")
        return self.spec.check_file(f"{text}/" if is_folder else text).include


@dataclass(frozen=True, slots=True)
class CodeFiles:
    """Files of a folder, relative to it and sorted; the same folder gives the same lists.

    Attributes:
        packed: what is code.
        results: left out, because the job writes its results there.
        credentials: left out, because it looks like credentials.
    """

    packed: list[Path]
    results: list[Path]
    credentials: list[Path]


def pack_code(
    root: Path,
    exclude: Iterable[str] = (),
    *,
    results: ResultPaths = NO_RESULTS,
    max_bytes: int = MAX_CODE_BYTES,
    max_files: int = MAX_CODE_FILES,
) -> CodeFiles:
    """Which files of `root` to pack, and which are left out although no pattern names them.

    Args:
        exclude: patterns as in `.gitignore`, relative to `root`.
        results: where the job writes.

    Raises:
        TreeTooLarge: more than `max_bytes` or `max_files`; the message names the largest entries.
        UnsafePath: a link points out of the folder, or a name cannot be stored.
        NotADirectoryError, FileNotFoundError: `root` is not a folder.
    """
    root = root.absolute()
    code: list[Path] = []
    left: list[Path] = []
    for path in sorted(_walk(root, root, _parent_rules(root), _rules(root, exclude))):
        (code if results.place_of(path) is None else left).append(path)
    sizes = {path: (root / path).lstat().st_size for path in code}
    if sum(sizes.values()) > max_bytes or len(code) > max_files:
        raise TreeTooLarge(_too_large(root, sizes, max_bytes, max_files), hint=_TOO_LARGE_HINT)
    credentials = [path for path in code if looks_like_credentials(root, path)]
    secret = frozenset(credentials)
    packed = [path for path in code if path not in secret]
    for path in packed:
        _check(root, path)
    return CodeFiles(packed, left, credentials)


_TOO_LARGE_HINT = (
    "list data and results in .yardignore or spec.code.exclude; "
    "store data sets as artifacts of their own and name them in spec.inputs"
)


def _walk(root: Path, folder: Path, rules: list[_Rules], exclude: _Rules) -> Iterator[Path]:
    here = rules + [_rules(folder, lines) for lines in _ignore_files(folder)]
    with os.scandir(folder) as entries:
        for entry in entries:
            path = Path(entry.path)
            is_folder = entry.is_dir(follow_symlinks=False)
            if entry.name in NEVER or _left_out(path, is_folder, here, exclude):
                continue
            if is_folder and entry.name == home().name and path.resolve() == home().resolve():
                continue  # the yard's tokens, keys and records
            if is_folder:
                yield from _walk(root, path, here, exclude)
            else:
                yield path.relative_to(root)


def _left_out(path: Path, is_folder: bool, rules: list[_Rules], exclude: _Rules) -> bool:
    if exclude.verdict(path, is_folder):
        return True
    for deeper_first in reversed(rules):
        verdict = deeper_first.verdict(path, is_folder)
        if verdict is not None:
            return verdict
    return False


def _parent_rules(root: Path) -> list[_Rules]:
    parents = [root, *root.parents]
    repository = next((index for index, folder in enumerate(parents) if (folder / ".git").exists()), 0)
    return [
        _rules(folder, lines)
        for folder in reversed(parents[1 : repository + 1])
        for lines in _ignore_files(folder, IGNORE_FILES[:1])
    ]


def _ignore_files(folder: Path, names: Iterable[str] = IGNORE_FILES) -> Iterator[list[str]]:
    for name in names:
        file = folder / name
        if file.is_file():
            yield file.read_text(errors="replace").splitlines()


def _rules(folder: Path, lines: Iterable[str]) -> _Rules:
    from pathspec import GitIgnoreSpec

    return _Rules(folder, GitIgnoreSpec.from_lines(lines))


def _check(root: Path, path: Path) -> None:
    full = root / path
    try:
        check_path(path.as_posix())
    except UnsafePath as error:
        raise UnsafePath(error.message, hint="rename the file, or list it in .yardignore") from None
    if full.is_symlink():
        check_link(path.as_posix(), str(full.readlink()))
    elif not full.is_file():
        raise UnsafePath(f"{full} is not a regular file", hint="list it in .yardignore")


def _too_large(root: Path, sizes: dict[Path, int], max_bytes: int, max_files: int) -> str:
    totals: dict[str, list[int]] = {}
    for path, size in sizes.items():
        entry = totals.setdefault(path.parts[0], [0, 0])
        entry[0] += size
        entry[1] += 1
    largest = sorted(totals.items(), key=lambda item: item[1], reverse=True)[:5]
    described = ", ".join(f"{name} ({size / 1e6:.1f} MB in {count:,} files)" for name, (size, count) in largest)
    return (
        f"the code in {root} is {sum(sizes.values()) / 1e6:.1f} MB in {len(sizes):,} files; "
        f"at most {max_bytes / 1e6:.0f} MB in {max_files:,} files are packed. Largest: {described}"
    )
