"""Peak memory of a process while a model of 2.1 GB in 32 bits is initialised in shards, on four processes on the CPU.

For each way there are four new processes. A process makes a small model of the same kind, so that all libraries are
loaded, and notes its resident memory. Then it makes the model through a `Trainer` and notes its peak when the optimizer
is about to be made: all initial values are there, and nothing else. The ways are FSDP and ZeRO-3, each with the class
of the model and with a folder of safetensors files, and FSDP with a module on the meta device.
The peer runs torch's `fully_shard` on a module on the meta device, `to_empty` and `reset_parameters` of every layer,
which gives other values on every process.

Bars: the peak of the largest process is at most 1.2 times its share plus the largest block.
`--whole` adds modules that are made as usual, before they are sharded.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from _harness import Bar, clean_environment, conclude, progress, table
from torch import Tensor, nn

PROCESSES, WIDTH, BLOCKS = 4, 2048, 16
LIMIT_OF_SHARE = 1.2
WAYS = {
    "fsdp": "FSDP, by the class",
    "fsdp-meta": "FSDP, a module on meta",
    "fsdp-weights": "FSDP, from safetensors",
    "zero3": "ZeRO-3, by the class",
    "zero3-weights": "ZeRO-3, from safetensors",
}
WHOLE = {"fsdp-whole": "FSDP, a whole module", "zero3-whole": "ZeRO-3, a whole module"}
PEER = "fully_shard on meta"


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(width) for _ in range(blocks)])

    def training_step(self, batch: Tensor) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return batch.square().mean()


LARGE, SMALL = partial(Model, WIDTH, BLOCKS), partial(Model, 128, 2)


def size(module: nn.Module) -> int:
    return sum(p.nbytes for p in module.parameters())


def sizes() -> tuple[int, int]:
    """Bytes of the model and of its largest block."""
    with torch.device("meta"):
        return size(LARGE()), size(Block(WIDTH))


# One process


class _Made(Exception):
    """The model has its initial values."""


def resident(name: str) -> int:
    """Bytes of this process's memory, by a name in `/proc/self/status`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def stop(named: Any) -> NoReturn:
    raise _Made


def ours(way: str, make: Callable[[], Model], weights: Path) -> None:
    from trainkit import Trainer
    from trainkit.strategies import FSDP, DeepSpeed

    place, _, how = way.partition("-")
    module: Any = make
    if how == "meta":
        with torch.device("meta"):
            module = make()
    elif how == "whole":
        module = make()
    Trainer(
        module=module,
        optimizer=stop,
        train=[torch.zeros(1)],
        max_duration="1st",
        strategy=FSDP(units=[Block]) if place == "fsdp" else DeepSpeed(stage=3),
        weights=weights if how == "weights" else None,
    ).fit()


def peer(make: Callable[[], Model]) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (PROCESSES,))
    with torch.device("meta"):
        module = make()
    for block in module.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    module.to_empty(device="cpu")
    for part in module.modules():
        if isinstance(part, nn.Linear):
            part.reset_parameters()


def process(way: str, folder: Path, rank: int) -> None:
    """Writes the peak above the memory before, and the seconds that it took."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(PROCESSES))
    store = dist.FileStore(str(folder / f"store-{way}"), PROCESSES)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=PROCESSES)
    run(way, SMALL, folder / "small")  # libraries load parts of themselves when they are first used
    dist.barrier()
    before, start = resident("VmRSS"), time.perf_counter()
    forget_peak()
    run(way, LARGE, folder / "large")
    found = [resident("VmHWM") - before, time.perf_counter() - start]
    dist.barrier()
    (folder / f"{way}-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def run(way: str, make: Callable[[], Model], weights: Path) -> None:
    if way == PEER:
        peer(make)
    else:
        with contextlib.suppress(_Made):
            ours(way, make, weights)


def write_weights(folder: Path, width: int, blocks: int) -> None:
    """Writes a model as two safetensors files with an index, a half at a time."""
    from safetensors.torch import save_file

    folder.mkdir()
    files: dict[str, str] = {}
    for half in range(2):
        name = f"model-{half + 1:05d}-of-00002.safetensors"
        part = {
            f"blocks.{at}.{key}": tensor
            for at in range(half * blocks // 2, (half + 1) * blocks // 2)
            for key, tensor in Block(width).state_dict().items()
        }
        save_file(part, folder / name)
        files.update(dict.fromkeys(part, name))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


# All processes


def measured(way: str, folder: Path) -> tuple[int, float]:
    """The peak of the largest of four new processes, in bytes, and the seconds of the slowest."""
    command = [sys.executable, __file__, "--folder", str(folder), "--way", way, "--rank"]
    running = [
        subprocess.Popen([*command, str(rank)], env=clean_environment(), stderr=subprocess.PIPE, text=True)
        for rank in range(PROCESSES)
    ]
    errors = [each.communicate()[1] for each in running]
    if any(each.returncode for each in running):
        raise RuntimeError(f"{way}:\n" + "\n".join(errors))
    found = [json.loads((folder / f"{way}-{rank}.json").read_text()) for rank in range(PROCESSES)]
    return max(peak for peak, _ in found), max(took for _, took in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--whole", action="store_true", help="also whole modules, which take 9 GB of memory")
    parser.add_argument("--only", choices=[*WAYS, *WHOLE], help="only one way, beside the peer")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way == "write":
        for make, name in ((LARGE, "large"), (SMALL, "small")):
            write_weights(options.folder / name, *make.args)
        return
    if options.way:
        process(options.way, options.folder, options.rank)
        return
    chosen = {**WAYS, **(WHOLE if options.whole else {})}
    if options.only:
        chosen = {options.only: {**WAYS, **WHOLE}[options.only]}
    found: dict[str, tuple[int, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run([sys.executable, __file__, "--folder", name, "--way", "write"], check=True)
        for way in [PEER, *chosen]:
            progress(way)
            found[way] = measured(way, folder)
        progress("")
    conclude_all(chosen, found)


def conclude_all(chosen: dict[str, str], found: dict[str, tuple[int, float]]) -> NoReturn:
    total, block = sizes()
    share = total / PROCESSES
    limit = LIMIT_OF_SHARE * share + block
    rows = [
        [chosen.get(way, way), f"{peak / 1e6:.0f}", f"{peak / share:.2f}", f"{took:.1f}"]
        for way, (peak, took) in found.items()
    ]
    title = f"{total / 1e6:.0f} MB on {PROCESSES} processes: share {share / 1e6:.0f} MB, block {block / 1e6:.0f} MB"
    table(title, ["way", "peak, MB", "shares", "s"], rows)
    bar = partial(Bar, peer=found[PEER][0] / 1e6, peer_name=PEER, unit="MB", bar=limit / 1e6)
    bars = [bar(name=chosen[way], ours=found[way][0] / 1e6) for way in WAYS if way in chosen]
    bars += [bar(name=chosen[way], ours=found[way][0] / 1e6) for way in WHOLE if way in chosen and len(chosen) == 1]
    raise SystemExit(conclude("sharded_init", bars))


if __name__ == "__main__":
    main()
