"""Whole weights in a folder of safetensors, from any strategy; tied weights stay tied."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trainkit.errors import DamagedCheckpoint
from trainkit.sharded import whole

if TYPE_CHECKING:
    from trainkit.loop.fit import Fit

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


def save_model(fit: Fit, folder: Path, *, max_shard_bytes: int, more: Mapping[str, str] | None = None) -> None:
    """Saves the module's weights, gathered on the first process. All processes have to call it.

    Args:
        fit: the run.
        folder: replaced as a whole.
        max_shard_bytes: the greatest size of one file.
        more: texts of further files, by name.
    """
    module: Any = fit.module
    # Sharded ones are gathered one after the other, by all processes.
    weights = {name: whole(each) for name, each in fit.strategy.weights().items()}
    if fit.strategy.is_main:
        partial = folder.with_name(f".{folder.name}.{os.getpid()}")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        if hasattr(module, "save_pretrained"):
            module.save_pretrained(partial, state_dict=weights, max_shard_size=max_shard_bytes)
        else:
            save_weights(weights, partial, max_shard_bytes=max_shard_bytes)
        for name, text in (more or {}).items():
            (partial / name).write_text(text, "utf-8")
        _replace(folder, partial)
    fit.strategy.barrier()


def save_weights(weights: Mapping[str, Tensor], folder: Path, *, max_shard_bytes: int = 5_000_000_000) -> None:
    """Writes tensors as safetensors: one file, or several and an index in the layout of Hugging Face.

    Tensors that share memory are written once; the file's metadata says which names they go by.
    """
    from safetensors.torch import save_file

    alone, aliases = _deduplicated(weights)
    shards = list(_shards(alone, max_shard_bytes))
    names = [f"model-{at + 1:05}-of-{len(shards):05}.safetensors" for at in range(len(shards))]
    names = names if len(shards) > 1 else [FILE]
    for name, shard in zip(names, shards, strict=True):
        plain = {key: value.detach().cpu().contiguous() for key, value in shard.items()}
        save_file(plain, folder / name, metadata={"format": "pt", "aliases": json.dumps(aliases)})
    if len(shards) > 1:
        files = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        total = sum(value.nbytes for value in alone.values())
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": files}, indent=1))


def load_weights(folder: str | Path) -> dict[str, Tensor]:
    """Reads what `save_weights` wrote; give it to `module.load_state_dict`. No pickle is read.

    Raises:
        DamagedCheckpoint: there are no weights in the folder, or a file of them is missing.
    """
    from safetensors import safe_open

    folder, weights = _present(Path(folder)), dict[str, Tensor]()
    aliases: dict[str, str] = {}
    for name in _files(folder):
        if not (folder / name).is_file():
            raise DamagedCheckpoint(f"{folder / name} is missing")
        with safe_open(folder / name, framework="pt") as file:
            weights |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - it is no mapping
            aliases |= json.loads((file.metadata() or {}).get("aliases", "{}"))
    return weights | {alias: weights[name] for alias, name in aliases.items()}


def _present(folder: Path) -> Path:
    old = _old(folder)  # there when a kill came between the two renames of a replacement
    return old if old.exists() and not folder.exists() else folder


def _old(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def _files(folder: Path) -> list[str]:
    if (folder / INDEX).is_file():
        return sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    return [FILE]


def _deduplicated(weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors without those that are others under a second name, and which names those are."""
    first: dict[tuple[Any, ...], str] = {}
    aliases: dict[str, str] = {}
    for name, each in weights.items():
        place = (each.untyped_storage().data_ptr(), each.storage_offset(), each.shape, each.stride(), each.device)
        same = first.setdefault(place, name) if each.numel() else name
        if same != name:
            aliases[name] = same
    return {name: each for name, each in weights.items() if name not in aliases}, aliases


def _shards(weights: Mapping[str, Tensor], most: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for name, each in weights.items():
        if shard and size + each.nbytes > most:
            yield shard
            shard, size = {}, 0
        shard[name] = each
        size += each.nbytes
    yield shard


def _replace(folder: Path, partial: Path) -> None:
    """Puts a finished folder in the place of the earlier one. A kill between the two renames leaves the earlier one
    where `load_weights` finds it."""
    old = _old(folder)
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    partial.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
