"""Train a small residual network on scikit-learn's handwritten digits.

Plain PyTorch: runs with `python train.py`, with `torchrun --nproc-per-node 2 train.py`, and as a job of the yard. Only
the `tracker` lines know that Trainyard exists. A step is an epoch: it is logged first and saved second, so a run that
was killed in between repeats the epoch and the series has no gap.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from trainyard import tracker

CHECKPOINTS = Path("checkpoints")
EXPORTS = Path("exports")


class Residual(nn.Module):
    """Two 3x3 convolutions and a way around them; keeps the shape (batch, channels, 8, 8).

    Normalised by groups, not by batch: it means the same on every worker and has no state of its own to resume.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.GroupNorm(4, channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.GroupNorm(4, channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.body(x))


def build_model(channels: int = 24) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1, bias=False),
        nn.GroupNorm(4, channels),
        nn.ReLU(),
        Residual(channels),
        Residual(channels),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(4 * channels, 10),
    )


def load_data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images as (count, 1, 8, 8) in 0..1 and their labels: 1,437 to train on, 360 held out."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    train, held_out = train_test_split(torch.arange(len(labels)), test_size=0.2, random_state=0, stratify=labels)
    return images[train], labels[train], images[held_out], labels[held_out]


def mean_over_workers(sums: Tensor) -> list[float]:
    """Adds `sums` over all workers; the last entry is the count that the others are divided by."""
    if dist.is_initialized():
        dist.all_reduce(sums)
    return [float(value) for value in sums[:-1] / sums[-1]]


class Trainer:
    def __init__(self, args: argparse.Namespace, rank: int, world: int) -> None:
        self.args, self.rank, self.world = args, rank, world
        torch.manual_seed(args.seed)
        self.model = build_model()
        self.replica = DistributedDataParallel(self.model) if world > 1 else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr, weight_decay=0.05)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=args.epochs)
        self.images, self.labels, self.held_out_images, self.held_out_labels = load_data()
        self.step = 0

    def train_epoch(self, epoch: int) -> tuple[float, float]:
        """One pass over this worker's share. Returns mean loss and accuracy over all workers."""
        self.replica.train()
        # The order depends on the epoch alone, so that a resumed run sees what an uninterrupted one would have.
        order = torch.randperm(len(self.labels), generator=torch.Generator().manual_seed(self.args.seed + epoch))
        share = order[: len(order) // self.world * self.world][self.rank :: self.world]
        sums = torch.zeros(3)
        for batch in share.split(self.args.batch_size):
            logits = self.replica(self.images[batch])
            loss = nn.functional.cross_entropy(logits, self.labels[batch])
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            hits = (logits.argmax(1) == self.labels[batch]).sum()
            sums += torch.stack([loss.detach() * len(batch), hits, torch.tensor(len(batch))])
        self.schedule.step()
        loss_mean, accuracy = mean_over_workers(sums)
        return loss_mean, accuracy

    @torch.no_grad()
    def evaluate(self) -> float:
        """Accuracy on the held-out images, which the workers share out among themselves."""
        self.model.eval()
        labels = self.held_out_labels[self.rank :: self.world]
        hits = (self.model(self.held_out_images[self.rank :: self.world]).argmax(1) == labels).sum()
        return mean_over_workers(torch.tensor([float(hits), float(len(labels))]))[0]

    def save(self) -> None:
        """Writes `step-N.pt` whole or not at all: a reader never sees half a file under that name."""
        CHECKPOINTS.mkdir(exist_ok=True)
        target = CHECKPOINTS / f"step-{self.step}.pt"
        state = {name: part.state_dict() for name, part in self.parts().items()} | {"step": self.step}
        torch.save(state, target.with_suffix(".tmp"))
        target.with_suffix(".tmp").rename(target)

    def export(self) -> None:
        EXPORTS.mkdir(exist_ok=True)
        torch.save(self.model.state_dict(), EXPORTS / "model.pt")

    def resume(self) -> None:
        newest = max(CHECKPOINTS.glob("step-*.pt"), key=lambda path: int(path.stem[5:]), default=None)
        path = os.environ.get("TRAINYARD_RESUME_FROM") or newest
        if path is None:
            return
        state = torch.load(path, weights_only=True)
        for name, part in self.parts().items():
            part.load_state_dict(state[name])
        self.step = state["step"]
        if self.rank == 0:
            print(f"resumed from {Path(path).name}")

    def parts(self) -> dict[str, nn.Module | torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler]:
        return {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32, help="per worker")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def train(args: argparse.Namespace, rank: int, world: int) -> None:
    trainer = Trainer(args, rank, world)
    trainer.resume()
    print(f"worker {rank} of {world}: {len(trainer.labels) // world} images")
    if rank == 0:
        tracker.params(vars(args))
    while trainer.step < args.epochs:
        loss, train_accuracy = trainer.train_epoch(trainer.step)
        accuracy = trainer.evaluate()
        trainer.step += 1
        if rank == 0:
            print(f"epoch {trainer.step}/{args.epochs}: loss {loss:.4f}, held-out accuracy {accuracy:.4f}")
            values = {"loss": loss, "train_accuracy": train_accuracy, "accuracy": accuracy}
            tracker.log(values, step=trainer.step)
            tracker.progress(trainer.step, total=args.epochs)
        # One file per machine: every node can resume from its own disk.
        if int(os.environ.get("LOCAL_RANK", 0)) == 0:
            trainer.save()
    accuracy = trainer.evaluate()
    if rank == 0:
        trainer.export()
        print(f"accuracy: {accuracy:.4f}")


def main() -> None:
    args = parse()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    train(args, rank, world)
    if world > 1:
        # Gloo's threads outlive the group; one that still holds a tensor of ours would abort the interpreter's exit.
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
