"""From the start of a process to its first new step, after so many batches of an epoch were done.

A run stops in the middle of its first epoch: once after a single batch, once after 50,000. Each is gone on from in a
new process, in turns. Beside them, in the environment of `trainers.txt`, Accelerate goes on by `skip_first_batches`,
which is how its documentation resumes within an epoch.

The bar: the median of what the late one takes longer, pair by pair, is at most 0.15 s. What was done is not read again.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from _harness import Bar, clean_environment, conclude, interleave, table
from _peers import environment

EARLY, LATE = 1, 50_000
LIMIT_S = 0.15
OURS, PEER = "trainkit", "Accelerate"
TRAINERS, PEER_FILE = Path(__file__).with_name("trainers.txt"), Path(__file__).with_name("_resume_peer.py")


def train(folder: Path, stop_at: int, *, stores: bool) -> None:
    """One life of a run with an epoch of 100,000 batches: it goes on from what is there and ends at this step."""
    import torch
    from torch import Tensor, nn
    from torch.utils.data import TensorDataset
    from trainkit import Callback, Checkpoints, Trainer
    from trainkit.data import Loader
    from trainkit.loop.fit import Fit

    class Line(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def training_step(self, batch: list[Tensor]) -> Tensor:
            return self.layer(batch[0]).square().mean()

    class First(Callback):
        def on_step_end(self, fit: Fit, loss: Tensor) -> None:
            if fit.resumed_step is not None and fit.state.step == fit.resumed_step + 1:
                print(f"first new step {fit.state.step}", flush=True)

    torch.manual_seed(0)
    torch.set_num_threads(1)
    Trainer(
        module=Line(),
        optimizer=lambda named: torch.optim.SGD(named, lr=0.01),
        train=Loader(TensorDataset(torch.randn(200_000, 4)), 2),
        max_duration=f"{stop_at}st",
        callbacks=[First()],
        log_every=None,
        checkpoints=Checkpoints(folder=folder, every=None, at_end=stores),
    ).fit()


def first_step(command: list[str], step: int) -> float:
    """Seconds from the start of a process to its first new step."""
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=clean_environment()) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        took = time.perf_counter() - start
    if process.returncode or line.split() != ["first", "new", "step", str(step + 1)]:
        raise RuntimeError(f"the run did not go on from step {step}: {line!r}")
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--quick", action="store_true", help="three rounds")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--stop-at", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train, options.stop_at, stores=False)
        return
    peer = environment(TRAINERS) / "python"
    cases = {}
    with tempfile.TemporaryDirectory() as folder:
        for step in (EARLY, LATE):
            place = Path(folder) / str(step)
            train(place, step, stores=True)
            ours = [sys.executable, __file__, "--train", str(place), "--stop-at", str(step + 1)]
            cases[OURS, step] = partial(first_step, ours, step)
            cases[PEER, step] = partial(first_step, [str(peer), str(PEER_FILE), str(step)], step)
        named = {f"{who}, batch {step:,}": case for (who, step), case in cases.items()}
        found = dict(zip(cases, interleave(named, 3 if options.quick else options.rounds).values(), strict=True))
    more = {
        who: statistics.median(late - early for early, late in zip(found[who, EARLY], found[who, LATE], strict=True))
        for who in (OURS, PEER)
    }
    table(
        "from the start of a process to its first new step, seconds",
        ["going on", f"at batch {EARLY}", f"at batch {LATE:,}", "more"],
        [
            [who, *(f"{statistics.median(found[who, step]):.2f}" for step in (EARLY, LATE)), f"{more[who]:+.3f}"]
            for who in (OURS, PEER)
        ],
    )
    bar = Bar(
        name=f"more at batch {LATE:,}",
        ours=max(more[OURS], 0.0),
        peer=max(more[PEER], 0.001),
        peer_name=PEER,
        unit="s",
        bar=LIMIT_S,
    )
    raise SystemExit(conclude("resume_cost", [bar]))


if __name__ == "__main__":
    main()
