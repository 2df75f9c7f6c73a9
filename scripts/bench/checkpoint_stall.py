"""How long training stands still for a checkpoint of 300 MB on the CPU, how long it takes in all, and how many bytes.

Beside it, in the same process and alternating: a copy of the same bytes into memory that is already there, torch.save
with fsync, and torch's own `async_save` of distributed checkpoints. Bars: the stall is at most 1.4 times the copy
and at most a fifth of torch.save's.

Then a run that makes a checkpoint at every step is killed by SIGKILL, 100 times at random moments, and started again.
The bar: no torn checkpoint was accepted. Each life compares what it goes on from with what that step has to hold.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from _harness import Bar, conclude, progress, table
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from trainkit import Callback, Checkpoints, Trainer
from trainkit.checkpoints.saver import Saver
from trainkit.checkpoints.snapshot import Snapshot
from trainkit.data import Loader
from trainkit.loop.fit import Fit

MEGABYTES = 300
LIMIT_OF_COPY, LIMIT_OF_SAVE = 1.4, 0.2


def state(megabytes: int) -> dict[str, Tensor]:
    """Weights and two moments of Adam, of layers of 4 MB."""
    return {f"part-{number}": torch.randn(1024, 1024) for number in range(max(1, megabytes * 1_000_000 // 2**22))}


def timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


class Stalls:
    """One way to save: `(stall, total)` of a save, in seconds, in a folder of its own."""

    def __init__(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        self.folder, self._tensors, self._step = folder, tensors, 0
        self._there = {name: torch.empty_like(each).copy_(each) for name, each in tensors.items()}
        policy = Checkpoints(folder=folder / "ours", keep_last=1)
        self.saver = Saver(folder / "ours", policy, rank=0, world_size=1, before_commit=lambda: None)

    def copy(self) -> tuple[float, float]:
        took = timed(lambda: [self._there[name].copy_(each) for name, each in self._tensors.items()])
        return took, took

    def ours(self) -> tuple[float, float]:
        self._step += 1
        snapshot = Snapshot(step=self._step, shared={"model": self._tensors}, own={}, results={})
        stall = timed(lambda: self.saver.save(snapshot))
        return stall, stall + timed(self.saver.wait)

    def torch_save(self) -> tuple[float, float]:
        took = timed(self._save)
        return took, took

    def _save(self) -> None:
        with (self.folder / "torch.pt").open("wb") as file:
            torch.save(self._tensors, file)
            file.flush()
            os.fsync(file.fileno())

    def dcp(self) -> tuple[float, float]:
        from torch.distributed.checkpoint.state_dict_saver import async_save

        shutil.rmtree(self.folder / "dcp", ignore_errors=True)
        futures: list[Any] = []
        stall = timed(
            lambda: futures.append(async_save(self._tensors, checkpoint_id=self.folder / "dcp", no_dist=True))
        )
        return stall, stall + timed(futures[0].result)


def measured(folder: Path, megabytes: int, rounds: int) -> dict[str, list[tuple[float, float]]]:
    stalls = Stalls(folder, state(megabytes))
    ways = {
        "a copy": stalls.copy,
        "trainkit": stalls.ours,
        "torch.save with fsync": stalls.torch_save,
        "DCP async_save": stalls.dcp,
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(-1, rounds):
        for name in list(ways) if number % 2 else list(ways)[::-1]:
            result = ways[name]()
            if number >= 0:
                found[name].append(result)
    stalls.saver.close()
    return found


# Kills


class Counting(nn.Module):
    """Weights that say of which step they are: all of them are the number of updates."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.zeros(64, 1024)) for _ in range(8)])

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return -sum((part.sum() for part in self.parts), torch.zeros(()))


class Checked(Callback):
    """Tells whether what was read is whole, or that a fresh run has a checkpoint."""

    def __init__(self, told: Connection) -> None:
        self._told, self._began = told, False

    def on_resume(self, fit: Fit) -> None:
        whole = all(bool((part == float(fit.state.step)).all()) for part in fit.module.parts)
        self._told.send("resumed" if whole else "torn")

    def on_checkpoint(self, fit: Fit, path: Path) -> None:
        if fit.resumed_step is None and not self._began:
            self._began = True
            self._told.send("fresh")


def live(folder: Path, told: Connection) -> None:
    torch.set_num_threads(1)
    Trainer(
        module=Counting(),
        optimizer=lambda named: torch.optim.SGD(named, lr=1.0),
        train=Loader(TensorDataset(torch.ones(10**6)), 1),
        max_duration="1000000st",
        callbacks=[Checked(told)],
        checkpoints=Checkpoints(folder=folder, every="1st", keep_last=2),
    ).fit()


def killed(folder: Path, kills: int) -> tuple[int, int]:
    """Kills lives of one run; returns how many went on from a whole checkpoint and how many from a torn one."""
    chance, said = random.Random(0), []
    start = multiprocessing.get_context("forkserver")  # imports torch once, and forks every life
    start.set_forkserver_preload(["torch", "trainkit.loop.fit", "trainkit.loop.keeper"])
    for number in range(kills + 1):
        progress(f"kill {number}/{kills}")
        here, there = start.Pipe()
        process = start.Process(target=live, args=(folder, there))
        process.start()
        there.close()
        try:
            said.append(here.recv())
        except EOFError:
            said.append("nothing")
        time.sleep(chance.uniform(0.0, 0.2))  # the moment of the kill
        process.kill()
        process.join()
    progress("")
    return said.count("resumed"), said.count("torn")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--megabytes", type=int, default=MEGABYTES)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--quick", action="store_true", help="three rounds and ten kills")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.kills = 3, 10
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = measured(folder, options.megabytes, options.rounds)
        sizes = {"trainkit": size(folder / "ours"), "torch.save with fsync": (folder / "torch.pt").stat().st_size}
        sizes["DCP async_save"] = size(folder / "dcp")
        resumed, torn = killed(folder / "killed", options.kills)
    stall = {way: statistics.median(each[0] for each in pairs) for way, pairs in found.items()}
    total = {way: statistics.median(each[1] for each in pairs) for way, pairs in found.items()}
    table(
        f"a checkpoint of {options.megabytes} MB",
        ["way", "stands still, ms", "in all, ms", "bytes"],
        [[way, f"{1000 * stall[way]:.0f}", f"{1000 * total[way]:.0f}", f"{sizes.get(way, 0):,}"] for way in found],
    )
    print(f"{options.kills} kills: {resumed} lives went on from a checkpoint, {torn} from a torn one")
    ours, copy, saved = stall["trainkit"], stall["a copy"], stall["torch.save with fsync"]
    bars = [
        Bar(name="over a copy", ours=ours, peer=copy, peer_name="a copy", unit="s", bar=LIMIT_OF_COPY * copy),
        Bar(
            name="a fifth of torch.save",
            ours=ours,
            peer=saved,
            peer_name="torch.save",
            unit="s",
            bar=LIMIT_OF_SAVE * saved,
        ),
        Bar(name="torn checkpoints accepted", ours=torn, peer=max(resumed, 1), peer_name="resumed", unit="", bar=0.5),
        Bar(
            name="lives that went on",
            ours=resumed,
            peer=options.kills,
            peer_name="kills",
            unit="",
            bar=options.kills,
            higher_is_better=True,
        ),
    ]
    raise SystemExit(conclude("checkpoint_stall", bars))


if __name__ == "__main__":
    main()
