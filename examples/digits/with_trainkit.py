"""The same training as `train.py`, with trainkit's loop instead of one's own.

Runs with `python with_trainkit.py`, with `torchrun --nproc-per-node 2 with_trainkit.py`, and as a job on any number of
nodes. Killed and started again, it goes on from its last checkpoint.
"""

import argparse
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassAccuracy
from train import build_model, load_data
from trainkit import Best, Checkpoints, Trainer
from trainkit.callbacks import KeepBest
from trainkit.data import Loader
from trainkit.metrics import Rule
from trainkit.optim import schedule
from trainkit.trackers import Yard


class Digits(nn.Module):
    """The model, and what it is trained and judged by."""

    def __init__(self) -> None:
        super().__init__()
        self.model = build_model()

    def training_step(self, batch: list[Tensor]) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self.model(images), labels)

    def evaluation_step(self, batch: list[Tensor]) -> dict[str, Tensor | tuple[Tensor, Tensor]]:
        images, labels = batch
        logits = self.model(images)
        return {"loss": F.cross_entropy(logits, labels), "accuracy": (logits, labels)}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64, help="of all workers together")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def trainer(args: argparse.Namespace) -> Trainer:
    torch.manual_seed(args.seed)
    images, labels, held_out_images, held_out_labels = load_data()
    return Trainer(
        module=Digits(),
        optimizer=partial(torch.optim.AdamW, lr=args.lr, weight_decay=0.05),
        schedule=schedule("CosineWithWarmup", num_warmup_steps=20),
        train=Loader(TensorDataset(images, labels), args.batch_size),
        evaluate=Loader(TensorDataset(held_out_images, held_out_labels), 180, shuffle=False),
        metrics={"accuracy": MulticlassAccuracy(10, average="micro")},
        max_duration=f"{args.epochs}ep",
        callbacks=[KeepBest(Rule.of("val/accuracy", mode="max"), "exports")],
        checkpoints=Checkpoints(every="1ep", best=Best(metric="val/accuracy", mode="max")),
        trackers=[Yard()],
        seed=args.seed,
        parameters=vars(args),
    )


def main() -> None:
    fit = trainer(parse()).fit()
    if fit.strategy.is_main:
        print(f"accuracy: {fit.results['val/accuracy']:.4f}")


if __name__ == "__main__":
    main()
