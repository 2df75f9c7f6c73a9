"""How long training stands still for a checkpoint of 300 MB on the CPU, how long it takes in all, and how many bytes.

A run makes a checkpoint after every step. Beside it, in the same process and alternating: a copy of the same bytes into
memory that is already there, torch.save with fsync, and torch's own `async_save` of distributed checkpoints. Lightning
and Accelerate save the same state in processes of their own, in the environment of `trainers.txt`; they do not sync.
Bars: the stall is at most 1.4 times the copy and at most a fifth of torch.save's.

Then a run that makes a checkpoint at every step is killed by SIGKILL, 100 times at random moments, and started again.
The bar: no torn checkpoint was accepted. Each life compares what it goes on from with what that step has to hold.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import statistics
import subprocess
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from _checkpoint_peer import timed, weights
from _harness import Bar, clean_environment, conclude, progress, table
from _peers import environment
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from trainkit import Callback, Checkpoints, Trainer
from trainkit.data import Loader
from trainkit.loop.fit import Fit

MEGABYTES = 300
PEERS = ("Lightning", "Accelerate")
TRAINERS = Path(__file__).with_name("trainers.txt")
LIMIT_OF_COPY, LIMIT_OF_SAVE = 1.4, 0.2


class Weights(nn.Module):
    def __init__(self, megabytes: int) -> None:
        super().__init__()
        self.parts = weights(megabytes)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return sum((part.sum() for part in self.parts), torch.zeros(()))


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


class Stalls(Callback):
    """Times the checkpoint that the loop makes at the end of each epoch, then the other ways to save the same state.

    Each epoch is one step. The loop stands still between `on_epoch_end` and `on_epoch_done`; the checkpoint is durable
    when its name is there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.found: dict[str, list[tuple[float, float]]] = {}
        """`(stall, total)` in seconds, by the name of the way."""

    def on_epoch_end(self, fit: Fit) -> None:
        self._start = time.perf_counter()

    def on_epoch_done(self, fit: Fit) -> None:
        stall = time.perf_counter() - self._start
        done = self.folder / "ours" / f"step-{fit.state.step}"
        while not done.exists():
            time.sleep(0.001)  # the loop is told at its next look, and stands still here
        self._note("trainkit", (stall, time.perf_counter() - self._start))
        state = {"model": fit.module.state_dict(), "optimizer": fit.optimizer.state_dict()}
        ways = {"a copy": self._copy, "torch.save with fsync": self._torch_save, "DCP async_save": self._dcp}
        for name in list(ways) if fit.state.step % 2 else list(ways)[::-1]:
            self._note(name, ways[name](state))

    def _note(self, name: str, result: tuple[float, float]) -> None:
        self.found.setdefault(name, []).append(result)

    def _copy(self, state: dict[str, Any]) -> tuple[float, float]:
        tensors = [
            *state["model"].values(),
            *(value for kept in state["optimizer"]["state"].values() for value in kept.values()),
        ]
        if "a copy" not in self.found:
            self._there = [torch.empty_like(each).copy_(each) for each in tensors]
        took = timed(lambda: [there.copy_(each) for there, each in zip(self._there, tensors, strict=True)])
        return took, took

    def _torch_save(self, state: dict[str, Any]) -> tuple[float, float]:
        took = timed(lambda: save_durably(state, self.folder / "torch.pt"))
        return took, took

    def _dcp(self, state: dict[str, Any]) -> tuple[float, float]:
        from torch.distributed.checkpoint.state_dict_saver import async_save

        shutil.rmtree(self.folder / "dcp", ignore_errors=True)
        futures: list[Any] = []
        stall = timed(lambda: futures.append(async_save(state, checkpoint_id=self.folder / "dcp", no_dist=True)))
        return stall, stall + timed(futures[0].result)


def save_durably(state: dict[str, Any], path: Path) -> None:
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def measured(folder: Path, megabytes: int, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """`(stall, total)` of every way in every round; the first round, which takes its memory, does not count."""
    stalls = Stalls(folder)
    Trainer(
        module=Weights(megabytes),
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-4),
        train=[[torch.zeros(1)]],
        max_duration=f"{rounds + 1}ep",
        callbacks=[stalls],
        checkpoints=Checkpoints(folder=folder / "ours", every="1ep", keep_last=1, at_end=False),
    ).fit()
    return {name: results[1:] for name, results in stalls.found.items()}


def of_peer(peer: str, folder: Path, megabytes: int, rounds: int) -> dict[str, Any]:
    """`stall` of a peer's own save, in seconds, the `copy` of the same state beside it, and `bytes`."""
    python, file = environment(TRAINERS) / "python", Path(__file__).with_name("_checkpoint_peer.py")
    command = [str(python), str(file), peer, str(folder), str(megabytes), str(rounds)]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{peer}:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
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
        peers = {peer: of_peer(peer, folder / peer, options.megabytes, options.rounds) for peer in PEERS}
        resumed, torn = killed(folder / "killed", options.kills)
    stall = {way: statistics.median(each[0] for each in pairs) for way, pairs in found.items()}
    total = {way: statistics.median(each[1] for each in pairs) for way, pairs in found.items()}
    rows = [[way, f"{1000 * stall[way]:.0f}", f"{1000 * total[way]:.0f}", f"{sizes.get(way, 0):,}"] for way in found]
    for peer, each in peers.items():
        times = f"{1000 * each['stall']:.0f} ({each['stall'] / each['copy']:.1f} copies there)"
        rows.append([f"{peer}, without fsync", times, f"{1000 * each['stall']:.0f}", f"{each['bytes']:,}"])
    table(
        f"a checkpoint of {options.megabytes} MB",
        ["way", "stands still, ms", "in all, ms", "bytes"],
        rows,
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
