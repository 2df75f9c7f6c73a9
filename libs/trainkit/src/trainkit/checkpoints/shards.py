"""Tensors on disk: one safetensors file per process, and an index that says which piece of which tensor is where.

Planning is torch.distributed.checkpoint's: who writes what of a tensor that several processes hold, and which stored
pieces make up what a process wants to read, also when their number has changed. Only the bytes are ours, because DCP's
own files need pickle to be read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from trainkit.checkpoints.files import Stored, write
from trainkit.errors import CheckpointError, DamagedCheckpoint, WrongCheckpoint

INDEX = "index.json"
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
_OPEN_BYTES = 2**26
"""Files are closed after so many bytes: what was read counts as this process's memory while they are open."""
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def file_of(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def refuse_other_types(tensors: Mapping[str, Tensor]) -> None:
    """Raises `CheckpointError` if a tensor has a type that safetensors files do not have."""
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            known = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in _NAMES))
            raise CheckpointError(
                f"{name} is {str(tensor.dtype).removeprefix('torch.')}, and a checkpoint can hold {known}: convert it"
            )


class Planner(DefaultSavePlanner):
    """Plans by the live tensors, of which it reads shapes only, and writes copies of them."""

    def __init__(self, tensors: Mapping[str, Tensor], copies: Mapping[str, Tensor], *, is_main: bool) -> None:
        super().__init__(flatten_state_dict=False)
        self.set_up_planner(dict(tensors), is_coordinator=is_main)
        self._copies = copies

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._copies[index.fqn]


def write_shard(path: Path, plan: SavePlan, planner: Planner) -> Stored:
    """Writes the pieces that `plan` gives this process, durably."""
    pieces = [(_piece(item), _dense(planner.resolve_data(item))) for item in plan.items]
    return write(path, safetensors(pieces))


def _dense(tensor: Any) -> Tensor:
    dense: Tensor = tensor.detach().cpu().contiguous()
    return dense


def _piece(item: WriteItem) -> str:
    offset = item.index.offset
    return item.index.fqn + (f"@{','.join(map(str, offset))}" if offset is not None and any(offset) else "")


def safetensors(pieces: Sequence[tuple[str, Tensor]]) -> Iterable[bytes | memoryview]:
    """A safetensors file of dense tensors on the host, in pieces, none of them copied."""
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in pieces:
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, tensor in pieces:
        yield tensor.reshape(-1).view(torch.uint8).numpy().data


def index_of(metadata: Metadata, plans: Sequence[SavePlan]) -> dict[str, Any]:
    """The index as plain values: for each tensor its type, shape and pieces."""
    files = {
        (item.index.fqn, tuple(item.index.offset or ())): rank for rank, plan in enumerate(plans) for item in plan.items
    }
    index: dict[str, Any] = {}
    for name, stored in metadata.state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata)
        index[name] = {
            "dtype": _NAMES[stored.properties.dtype],
            "shape": list(stored.size),
            "pieces": [
                {"offset": list(piece.offsets), "shape": list(piece.sizes), "file": file_of(_owner(files, name, piece))}
                for piece in stored.chunks
            ],
        }
    return index


def _owner(files: Mapping[tuple[str, tuple[int, ...]], int], name: str, piece: ChunkStorageMetadata) -> int:
    return files.get((name, tuple(piece.offsets)), files.get((name, ()), 0))


def read_index(folder: Path) -> dict[str, Any]:
    """The index of a checkpoint.

    Raises:
        DamagedCheckpoint: it is missing or no index.
    """
    try:
        index = json.loads((folder / INDEX).read_text())
    except (OSError, ValueError) as error:
        raise DamagedCheckpoint(f"{folder}: {INDEX} cannot be read: {error}") from error
    assert isinstance(index, dict)
    return index


def empty_like(entry: Mapping[str, Any]) -> Tensor:
    """A tensor on the host with the stored type and shape."""
    return torch.empty(entry["shape"], dtype=_DTYPES[entry["dtype"]])


def load(folder: Path, index: Mapping[str, Any], wanted: dict[str, Tensor]) -> None:
    """Reads into the tensors in `wanted`, in place; sharded ones get their part, however it was sharded when stored.

    Raises:
        WrongCheckpoint: a tensor is not in the checkpoint, or has another shape.
    """
    _check(folder, index, wanted)
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    planner.set_up_planner(dict(wanted), _metadata(index), is_coordinator=False)
    plan = planner.finish_plan(planner.create_local_plan())
    places = {
        (name, tuple(piece["offset"])): piece["file"] for name, entry in index.items() for piece in entry["pieces"]
    }
    opened: dict[str, Any] = {}
    read = 0
    for item in plan.items:
        name, offset = item.storage_index.fqn, tuple(item.storage_index.offset or ())
        offset = offset or (0,) * len(index[name]["shape"])
        file = places[name, offset]
        if file not in opened:
            opened[file] = safe_open(folder / file, framework="pt")
        piece = name + (f"@{','.join(map(str, offset))}" if any(offset) else "")
        target = planner.resolve_tensor(item).detach()
        target.copy_(_part(opened[file], piece, item.storage_offsets, item.lengths))
        read += target.nbytes
        if read > _OPEN_BYTES:
            opened.clear()
            read = 0
        planner.commit_tensor(item, target)


def _part(file: Any, piece: str, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """A part of a piece, without reading the rest of it."""
    bounds = tuple(slice(start, start + length) for start, length in zip(offsets, lengths, strict=True))
    part: Tensor = file.get_slice(piece)[bounds] if bounds and all(lengths) else file.get_tensor(piece)
    return part


def index_of_files(folder: Path, files: Iterable[str]) -> dict[str, Any]:
    """The index, in the form of `index_of`, of files of whole tensors that any library may have written.

    Raises:
        DamagedCheckpoint: one of them is missing, is not a safetensors file, or has a type that is not known here.
    """
    index: dict[str, Any] = {}
    for name in files:
        try:
            with safe_open(folder / name, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118
                    tensor = file.get_slice(key)
                    shape, dtype = list(tensor.get_shape()), tensor.get_dtype()
                    if dtype not in _DTYPES:
                        raise DamagedCheckpoint(f"{folder / name}: {key} has type {dtype}, which cannot be read here")
                    piece = {"offset": [0] * len(shape), "shape": shape, "file": name}
                    index[key] = {"dtype": dtype, "shape": shape, "pieces": [piece]}
        except (OSError, SafetensorError) as error:
            raise DamagedCheckpoint(f"{folder / name} cannot be read: {error}") from error
    return index


def _check(folder: Path, index: Mapping[str, Any], wanted: Mapping[str, Tensor]) -> None:
    missing = [name for name in wanted if name not in index]
    if missing:
        raise WrongCheckpoint(f"{folder} has no {', '.join(missing[:5])}: it belongs to another model or optimizer")
    for name, tensor in wanted.items():
        if list(tensor.shape) != index[name]["shape"]:
            raise WrongCheckpoint(
                f"{folder}: {name} has shape {tuple(index[name]['shape'])}, here it is {tuple(tensor.shape)}: "
                "it belongs to another model"
            )


def _metadata(index: Mapping[str, Any]) -> Metadata:
    return Metadata(
        {
            name: TensorStorageMetadata(
                properties=TensorProperties(dtype=_DTYPES[entry["dtype"]]),
                size=torch.Size(entry["shape"]),
                chunks=[
                    ChunkStorageMetadata(offsets=torch.Size(piece["offset"]), sizes=torch.Size(piece["shape"]))
                    for piece in entry["pieces"]
                ],
            )
            for name, entry in index.items()
        }
    )
