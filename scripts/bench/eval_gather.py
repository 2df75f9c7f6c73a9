"""Evaluation over four processes: trainkit's, against torchmetrics used by hand and against gathering every batch.

All evaluate one classifier on the same 8,003 samples (no multiple of the batch) with accuracy and F1, in the same four
gloo processes, alternating; batches are in memory. By hand each process updates its own metrics and they meet once;
gathering exchanges logits and labels of every batch, as `gather_for_metrics` of Accelerate does. The bar: not slower
than either, by processor time of all processes (medians; a twentieth is noise). All three find the same numbers.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _harness import Bar, clean_environment, conclude, table

SAMPLES, BATCH, CLASSES, PROCESSES = 8_003, 64, 10, 4
NOISE = 1.05


def work(folder: Path, rank: int, rounds: int) -> None:
    """One process: evaluates in three ways and writes what each cost it."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch import Tensor, nn
    from torch.utils.data import TensorDataset
    from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score
    from trainkit import Callback, Trainer
    from trainkit.data import Loader
    from trainkit.loop.fit import Fit

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, CLASSES))

        def training_step(self, batch: list[Tensor]) -> Tensor:
            return F.cross_entropy(self.layers(batch[0]), batch[1])

        def evaluation_step(self, batch: list[Tensor]) -> dict[str, Any]:
            logits = self.layers(batch[0])
            return {"loss": F.cross_entropy(logits, batch[1]), "accuracy": (logits, batch[1]), "f1": (logits, batch[1])}

    def metrics() -> dict[str, Any]:
        return {"accuracy": MulticlassAccuracy(CLASSES, average="micro"), "f1": MulticlassF1Score(CLASSES)}

    torch.set_num_threads(1)
    torch.manual_seed(0)
    store = dist.FileStore(str(folder / "store"), PROCESSES)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=PROCESSES)
    inputs, labels = torch.randn(SAMPLES, 64), torch.randint(0, CLASSES, (SAMPLES,))
    module, mine = Net(), metrics()
    pieces = list(zip(inputs.split(BATCH * PROCESSES), labels.split(BATCH * PROCESSES), strict=True))

    def bounds(batch: Tensor) -> list[int]:
        return [len(batch) * each // PROCESSES for each in range(PROCESSES + 1)]

    def own(batch: Tensor) -> Tensor:
        return batch[bounds(batch)[rank] : bounds(batch)[rank + 1]]

    def by_hand(gather: bool) -> dict[str, float]:
        module.eval()
        total = torch.zeros(2, dtype=torch.float64)
        with torch.no_grad():
            for all_inputs, all_labels in pieces:
                logits, wanted = module.layers(own(all_inputs)), own(all_labels)
                if gather:
                    logits, wanted = gathered(logits, all_labels), gathered(wanted, all_labels)
                total += torch.tensor([float(F.cross_entropy(logits, wanted, reduction="sum")), float(len(wanted))])
                for metric in mine.values():
                    metric.update(logits, wanted)
        if gather:
            for metric in mine.values():
                metric._to_sync = False  # everybody has everything
        else:
            dist.all_reduce(total)
        results = {f"val/{name}": float(metric.compute()) for name, metric in mine.items()}
        for metric in mine.values():
            metric.reset()
            metric._to_sync = True
        module.train()
        return {**results, "val/loss": float(total[0] / total[1])}

    def gathered(values: Tensor, batch: Tensor) -> Tensor:
        """The rows of all processes: padded to one size, exchanged, cut. Sizes follow from the batch's."""
        sizes = [end - start for start, end in itertools.pairwise(bounds(batch))]
        padded = torch.cat([values, values.new_zeros(max(sizes) - len(values), *values.shape[1:])])
        every = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(every, padded)
        return torch.cat([part[:size] for part, size in zip(every, sizes, strict=True)])

    costs: dict[str, list[float]] = {"trainkit": [], "torchmetrics by hand": [], "gathering every batch": []}

    class Compare(Callback):
        def on_fit_start(self, fit: Fit) -> None:
            ways: dict[str, Callable[[], dict[str, float]]] = {
                "trainkit": fit.evaluate,
                "torchmetrics by hand": lambda: by_hand(False),
                "gathering every batch": lambda: by_hand(True),
            }
            for number in range(rounds + 1):
                results = {}
                for name in list(ways) if number % 2 else list(ways)[::-1]:
                    dist.barrier()
                    start = time.process_time()
                    results[name] = ways[name]()
                    if number:
                        costs[name].append(time.process_time() - start)
                for name, values in results.items():
                    for key, value in values.items():
                        assert abs(value - results["trainkit"][key]) < 1e-5, (name, key, results)

    Trainer(
        module=module,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.01),
        train=Loader(TensorDataset(inputs, labels), BATCH * PROCESSES),
        evaluate=[[own(each) for each in piece] for piece in pieces],
        metrics=metrics(),
        strategy="ddp",
        max_duration="1st",
        evaluate_last=False,
        evaluate_every=None,
        log_every=None,
        callbacks=[Compare()],
    ).fit()
    (folder / f"costs-{rank}").write_text(json.dumps(costs))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--quick", action="store_true", help="three rounds")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work, int(os.environ["RANK"]), options.rounds)
        return
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, __file__, "--work", name, "--rounds", str(3 if options.quick else options.rounds)]
        world = {"WORLD_SIZE": str(PROCESSES)}
        started = [
            subprocess.Popen(command, env=clean_environment(RANK=str(rank), LOCAL_RANK=str(rank), **world))
            for rank in range(PROCESSES)
        ]
        codes = [process.wait() for process in started]
        if any(codes):
            raise SystemExit("a process failed")
        costs = [json.loads((Path(name) / f"costs-{rank}").read_text()) for rank in range(PROCESSES)]
    rounds = {name: [sum(each) for each in zip(*(cost[name] for cost in costs), strict=True)] for name in costs[0]}
    medians = {name: statistics.median(values) for name, values in rounds.items()}
    table(
        f"an evaluation of {SAMPLES:,} samples on {PROCESSES} processes, milliseconds of processor time",
        ["way", "median"],
        [[name, f"{1000 * value:.0f}"] for name, value in medians.items()],
    )
    ours = medians.pop("trainkit")
    bars = [
        Bar(name=f"not slower than {n}", ours=ours, peer=peer, peer_name=n, unit="s", bar=NOISE * peer)
        for n, peer in medians.items()
    ]
    raise SystemExit(conclude("eval_gather", bars))


if __name__ == "__main__":
    main()
