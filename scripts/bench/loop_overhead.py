"""What trainkit's loop costs over the same steps written by hand, in microseconds of processor time a step.

Both train their own copy of one model on the same ready batches, in blocks that alternate within one process: the data
that the loop reads from times the block that the loop has just done, then runs the same block by hand and times that
(`_paired.py`). The peers' loops are measured in the same way on the same work, each in a process of its own, in the
environment of `trainers.txt`, in turns with ours.

Bars, on the upper 95 % bound of the median difference: a small MLP (64-128-10, batch 32) at most 10 microseconds with
nothing switched on, and at most 40 with a callback and the loss logged at every step; a ResNet-20 at 32x32 shows no
difference (the lower bound is not above 0). And ours costs less than every peer's loop, by the medians.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from _harness import Bar, clean_environment, conclude, progress, table
from _paired import IMAGES, LEARNING_RATE, SMALL, Batch, Measured, Paired, Work, settle
from _peers import environment
from torch import Tensor, nn
from trainkit import Callback, Tracker, Trainer
from trainkit.loop.fit import Fit
from trainkit.trackers import RunContext

OURS = "trainkit"
PEERS = ("Ignite", "Fabric", "Accelerate", "Lightning", "Transformers")
TRAINERS, PEER = Path(__file__).with_name("trainers.txt"), Path(__file__).with_name("_trainer_peer.py")
NOTHING_ON, LOGS, RESNET = "MLP, nothing on", "MLP, callback and log each step", "ResNet-20"
LIMITS = {NOTHING_ON: 10.0, LOGS: 40.0}


class Step(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Batch) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])


class Counted(Callback):
    def __init__(self) -> None:
        self.count = 0

    def on_step_end(self, fit: Fit, loss: Tensor) -> None:
        self.count += 1


class Kept(Tracker):
    def __init__(self) -> None:
        self.rows: list[Any] = []

    def open(self, context: RunContext) -> None:
        self.rows = []

    def log(self, values: Mapping[str, float | Tensor], step: int) -> None:
        self.rows.append((step, values))

    def close(self, outcome: str) -> None:
        self.rows.clear()


def ours(work: Work, pairs: int, logs: bool) -> Measured:
    data = Paired(work, pairs)
    on: dict[str, Any] = {"callbacks": [Counted()], "trackers": [Kept()], "log_every": "1st"}
    Trainer(
        module=Step(work.module()),
        optimizer=partial(torch.optim.SGD, lr=LEARNING_RATE),
        train=data,
        max_duration="1ep",
        **(on if logs else {"log_every": None}),
    ).fit()
    return data.measured()


CASES = {NOTHING_ON: ("MLP", SMALL, False), LOGS: ("MLP", SMALL, True), RESNET: ("ResNet-20", IMAGES, False)}


def measured(who: str, case: str, pairs: int) -> Measured:
    """One loop's cost, in a process of its own."""
    name, _, logs = CASES[case]
    command = [sys.executable, __file__, "--ours", case, "--pairs", str(pairs)]
    if who != OURS:
        python = environment(TRAINERS) / "python"
        command = [str(python), str(PEER), who, name, str(pairs), "logs" if logs else "bare"]
    progress(f"{case}: {who}")
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{who}, {case}:\n{done.stderr}")
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def middle(rounds: list[Measured]) -> Measured:
    """The round with the middle difference."""
    return sorted(rounds, key=lambda each: each.difference)[len(rounds) // 2]


def found_in(case: str, pairs: int, rounds: int) -> dict[str, Measured]:
    """Every loop's cost: processes take turns, and the middle one of each counts."""
    cases = (OURS, *PEERS)
    kept: dict[str, list[Measured]] = {who: [] for who in cases}
    for number in range(rounds):
        for who in cases if number % 2 == 0 else cases[::-1]:
            kept[who].append(measured(who, case, pairs))
    return {who: middle(rounds) for who, rounds in kept.items()}


def bars_of(case: str, found: Mapping[str, Measured]) -> list[Bar]:
    mine = found[OURS]
    if case == RESNET:
        return [Bar(name=case, ours=max(mine.low, 0.0), peer=mine.by_hand, peer_name="by hand", unit="us", bar=0.001)]
    who = min(PEERS, key=lambda peer: found[peer].difference)
    nearest = found[who].difference
    values: dict[str, Any] = {"peer": nearest, "peer_name": who, "unit": "us"}
    return [
        Bar(name=case, ours=mine.high, bar=LIMITS[case], **values),
        Bar(name=f"{case}: ahead of the nearest peer", ours=mine.difference, bar=nearest, **values),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="fewer steps, one round, no ResNet")
    parser.add_argument("--ours", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ours:
        _, work, logs = CASES[options.ours]
        settle()
        print(json.dumps(asdict(ours(work, options.pairs, logs))))
        return
    pairs, rounds = (20, 1) if options.quick else (options.pairs, options.rounds)
    bars = []
    for case in (NOTHING_ON, LOGS) if options.quick else CASES:
        found = found_in(case, pairs, rounds)
        rows = [
            [who, f"{each.by_hand:.1f}", f"{each.difference:+.1f}", f"{each.low:+.1f} to {each.high:+.1f}"]
            for who, each in found.items()
        ]
        progress("")
        table(f"{case}: microseconds of processor time a step", ["loop", "by hand", "over it", "95 % bounds"], rows)
        bars += bars_of(case, found)
    raise SystemExit(conclude("loop_overhead", bars))


if __name__ == "__main__":
    main()
