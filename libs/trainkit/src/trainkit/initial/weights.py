"""Weights on disk, read into a module's tensors in place: of a sharded tensor, a process reads its part alone."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from trainkit.catalogue import nearest
from trainkit.checkpoints.tree import unescaped
from trainkit.errors import DamagedCheckpoint, InvalidSetup

_MODEL = "/model/"
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SHOWN = 5


@dataclass(frozen=True)
class Weights:
    """Weights that a module starts with.

        Trainer(module=Net, weights=Weights("base", missing=["head.*"]), ...)

    Args:
        path: a safetensors file; a folder with `model.safetensors`, or with several files and their
            `model.safetensors.index.json`; or a checkpoint of trainkit.
        missing: patterns of names that need not be there: they keep the values that the module gives them.
        unexpected: patterns of names that are there and are not used.
        prefix: what the module's names begin with and the file's names do not. Default: the module's attribute
            `weights_prefix`, if it has one.
    """

    path: str | Path
    missing: Sequence[str] = ()
    unexpected: Sequence[str] = ()
    prefix: str | None = None

    def damage(self) -> str | None:
        """What is wrong with the files of a checkpoint, which have checksums. One process has to look."""
        from trainkit.checkpoints import folder, shards

        if not (Path(self.path) / shards.INDEX).is_file():
            return None
        try:
            folder.verify(Path(self.path))
        except DamagedCheckpoint as error:
            return str(error)
        return None

    def open(self, module: nn.Module) -> OpenWeights:
        """Compares the names and shapes with a module's.

        Raises:
            InvalidSetup: there is no such file, or it does not fit the module.
        """
        path = Path(self.path)
        stored = _stored(path)
        prefix = self.prefix
        if prefix is None:
            prefix = "" if stored.is_checkpoint else getattr(module, "weights_prefix", "")
        tensors = {name: each for name, each in module.state_dict(keep_vars=True).items() if isinstance(each, Tensor)}
        own = {name: name.removeprefix(prefix) for name in tensors}  # the names that a file has
        found = {name: key for name, key in own.items() if key in stored.keys}
        # A file may have a tied tensor under one of its names only.
        tied = {id(tensors[name]): key for name, key in found.items()}
        found = {name: found.get(name, tied.get(id(each), "")) for name, each in tensors.items() if id(each) in tied}
        self._refuse_missing([name for name in tensors if name not in found], stored, type(module).__name__)
        self._refuse_unexpected(stored.keys.keys() - found.values(), list(own.values()))
        wrong = [
            f"{key} has shape {tuple(stored.shape(key))}, and {name} of the module {tuple(tensors[name].shape)}"
            for name, key in found.items()
            if list(tensors[name].shape) != stored.shape(key)
        ]
        if wrong:
            raise InvalidSetup(
                f"{path}: {_listed(wrong)}: make the module with the file's sizes, or name the tensors in both "
                "missing and unexpected of Weights"
            )
        return OpenWeights(stored, found)

    def _refuse_missing(self, absent: list[str], stored: _Stored, module: str) -> None:
        if refused := _unmatched(absent, self.missing):
            near = nearest(refused[0], stored.keys)
            raise InvalidSetup(
                f"{self.path} has no {_listed(refused)} of {module}{_hint(near)}: pass Weights(..., prefix=...) if "
                "names differ in how they begin, or Weights(..., missing=[...]) for those that the module initialises"
            )

    def _refuse_unexpected(self, spare: Iterable[str], names: list[str]) -> None:
        if refused := _unmatched(sorted(spare), self.unexpected):
            raise InvalidSetup(
                f"{self.path} has {_listed(refused)}, and the module does not{_hint(nearest(refused[0], names))}: pass "
                "Weights(..., unexpected=[...]) for those that are not to be read"
            )


class OpenWeights:
    """Weights that fit a module.

    Attributes:
        names: of the module's tensors that are read.
    """

    def __init__(self, stored: _Stored, keys: Mapping[str, str]) -> None:
        self._stored, self._keys = stored, {name: stored.keys[key] for name, key in keys.items()}
        self.names = keys.keys()

    def read(self, targets: Mapping[str, Tensor]) -> None:
        """Reads into these tensors, in place, by their names in the module. Types are converted."""
        from trainkit.checkpoints import shards

        wanted: dict[str, Tensor] = {}
        for name, target in targets.items():
            wanted[self._keys[name]] = target.detach()
        shards.load(self._stored.folder, {key: self._stored.index[key] for key in wanted}, wanted)


@dataclass(frozen=True)
class _Stored:
    """Files of weights: the index as a checkpoint has it, and the index's keys by the names of tensors."""

    folder: Path
    index: Mapping[str, Any]
    keys: Mapping[str, str]
    is_checkpoint: bool = False

    def shape(self, name: str) -> list[int]:
        return list(self.index[self.keys[name]]["shape"])


def _stored(path: Path) -> _Stored:
    from trainkit.checkpoints import shards

    if (path / shards.INDEX).is_file():
        index = shards.read_index(path)
        keys = {unescaped(key.removeprefix(_MODEL)): key for key in index if key.startswith(_MODEL)}
        return _Stored(path, index, keys, is_checkpoint=True)
    if path.is_file():
        files = [path.name]
    elif (path / _INDEX).is_file():
        files = _files(path / _INDEX)
    elif (path / _SINGLE).is_file():
        files = [_SINGLE]
    else:
        raise InvalidSetup(
            f"weights={str(path)!r} is not there: give a safetensors file, a folder with {_SINGLE} or {_INDEX}, or a "
            "checkpoint of trainkit (step-...)"
        )
    at = path.parent if path.is_file() else path
    index = shards.index_of_files(at, files)
    return _Stored(at, index, {name: name for name in index})


def _files(index: Path) -> list[str]:
    try:
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise DamagedCheckpoint(f"{index} cannot be read: {type(error).__name__}: {error}") from error


def _unmatched(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    return [name for name in names if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]


def _hint(near: str) -> str:
    return f" (did you mean {near}?)" if near else ""


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
