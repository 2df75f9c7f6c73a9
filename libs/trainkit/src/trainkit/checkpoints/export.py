"""The weights of a checkpoint as safetensors files that any library reads.

python -m trainkit.checkpoints.export checkpoints/step-900 model.safetensors --dtype bf16
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainkit.checkpoints import folder as folders
from trainkit.checkpoints import shards
from trainkit.checkpoints.files import sync_folder, write
from trainkit.checkpoints.tree import unescaped
from trainkit.errors import CheckpointError

_MODEL = "/model/"
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def model(checkpoint: Path) -> dict[str, Tensor]:
    """The weights in a checkpoint by name, whole and on the host, however they were sharded.

    Raises:
        DamagedCheckpoint: a file is not as it was written.
    """
    folders.verify(checkpoint)
    index = shards.read_index(checkpoint)
    found = {name: shards.empty_like(entry) for name, entry in index.items() if name.startswith(_MODEL)}
    shards.load(checkpoint, index, found)
    return {unescaped(name.removeprefix(_MODEL)): tensor for name, tensor in found.items()}


def export(checkpoint: Path, target: Path, *, dtype: str | None = None, max_bytes: int | None = None) -> list[Path]:
    """Writes the weights to `target`; with `max_bytes`, to several files beside it with an index, as Hugging Face does.

    Args:
        dtype: `fp32`, `fp16` or `bf16` for floating weights; None keeps what they are.
        max_bytes: the most that one file holds, unless a single tensor is larger.

    Returns:
        The files, the index last when there is one.

    Raises:
        DamagedCheckpoint: a file of the checkpoint is not as it was written.
        CheckpointError: the arguments make no sense.
    """
    if dtype is not None and dtype not in _DTYPES:
        raise CheckpointError(f"dtype={dtype!r}: choose one of {', '.join(_DTYPES)}")
    weights = {name: _cast(tensor, dtype) for name, tensor in model(checkpoint).items()}
    target.parent.mkdir(parents=True, exist_ok=True)
    parts = list(_parts(weights, max_bytes))
    if len(parts) == 1:
        paths = [_put(target, parts[0])]
    else:
        named = [target.with_stem(f"{target.stem}-{at + 1:05d}-of-{len(parts):05d}") for at in range(len(parts))]
        paths = [_put(path, part) for path, part in zip(named, parts, strict=True)]
        paths.append(_put_index(target, dict(zip([path.name for path in paths], parts, strict=True))))
    sync_folder(target.parent)
    return paths


def _cast(tensor: Tensor, dtype: str | None) -> Tensor:
    return tensor.to(_DTYPES[dtype]) if dtype is not None and tensor.is_floating_point() else tensor


def _parts(weights: Mapping[str, Tensor], max_bytes: int | None) -> Iterator[dict[str, Tensor]]:
    part: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights.items():
        if part and max_bytes is not None and size + tensor.nbytes > max_bytes:
            yield part
            part, size = {}, 0
        part[name] = tensor
        size += tensor.nbytes
    yield part


def _put(path: Path, tensors: Mapping[str, Tensor]) -> Path:
    draft = path.with_name(f".{path.name}")
    write(draft, shards.safetensors(list(tensors.items())))
    return draft.rename(path)


def _put_index(target: Path, parts: Mapping[str, Mapping[str, Tensor]]) -> Path:
    index: dict[str, Any] = {
        "metadata": {"total_size": sum(tensor.nbytes for part in parts.values() for tensor in part.values())},
        "weight_map": {name: file for file, part in parts.items() for name in part},
    }
    path = target.with_name(f"{target.name}.index.json")
    write(path, [json.dumps(index, indent=1).encode()])
    return path


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m trainkit.checkpoints.export", description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--dtype", choices=list(_DTYPES))
    arguments = parser.parse_args()
    for path in export(arguments.checkpoint, arguments.target, dtype=arguments.dtype):
        print(path)  # noqa: T201


if __name__ == "__main__":
    main()
