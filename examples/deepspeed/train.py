"""Train a classifier of handwritten digits with DeepSpeed ZeRO, on processors.

The stage is in the DeepSpeed configuration (`zero2.json`, `zero3.json`). Runs as a job of the yard and with
`DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 train.py --deepspeed_config zero2.json`.
"""

import argparse
import os
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from trainyard import tracker

CHECKPOINTS = Path("checkpoints")
# In CHECKPOINTS' file system, so that a finished checkpoint can be renamed into it.
SAVING = Path(".saving")


def build_model(width: int = 256) -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def load_data() -> list[Tensor]:
    """Training images (1437, 64), held-out images (360, 64), and the labels of both."""
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    return list(train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels))


def train_epoch(engine: deepspeed.DeepSpeedEngine, images: Tensor, labels: Tensor, epoch: int) -> float:
    """One pass over this worker's share of the data. Returns the mean loss over all workers."""
    rank, world = dist.get_rank(), dist.get_world_size()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))
    # Every worker takes the same number of batches: ZeRO meets in each of them.
    share = order[: len(order) // world * world][rank::world]
    losses = []
    engine.train()
    for batch in share.split(engine.train_micro_batch_size_per_gpu()):
        loss = nn.functional.cross_entropy(engine(images[batch]), labels[batch])
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    mean = torch.stack(losses).mean()
    dist.all_reduce(mean)
    return float(mean) / world


@torch.no_grad()
def evaluate(engine: deepspeed.DeepSpeedEngine, images: Tensor, labels: Tensor) -> float:
    """Accuracy on the held-out images, computed by every worker: under ZeRO 3 all have to take part."""
    engine.eval()
    return float((engine(images).argmax(1) == labels).float().mean())


def save(engine: deepspeed.DeepSpeedEngine, step: int) -> None:
    """Makes the folder `step-N` appear whole: all workers write beside it, then one renames it into place."""
    tag = f"step-{step}"
    engine.save_checkpoint(str(SAVING), tag=tag, client_state={"step": step}, save_latest=False)
    dist.barrier()
    if int(os.environ["LOCAL_RANK"]) == 0:
        CHECKPOINTS.mkdir(exist_ok=True)
        (SAVING / tag).rename(CHECKPOINTS / tag)


def resume(engine: deepspeed.DeepSpeedEngine) -> int:
    """Loads the newest checkpoint, if there is one. Returns the step it was saved at, else 0."""
    newest = max(CHECKPOINTS.glob("step-*"), key=lambda path: int(path.name[5:]), default=None)
    path = os.environ.get("TRAINYARD_RESUME_FROM") or newest
    if path is None:
        return 0
    folder = Path(path)
    _, client_state = engine.load_checkpoint(str(folder.parent), tag=folder.name)
    if dist.get_rank() == 0:
        print(f"resumed from {folder.name}")
    return int(client_state["step"])


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    model = build_model()
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    images, held_out_images, labels, held_out_labels = load_data()
    if dist.get_rank() == 0:
        tracker.params({"epochs": args.epochs, "zero_stage": engine.zero_optimization_stage()})
    for step in range(resume(engine) + 1, args.epochs + 1):
        loss = train_epoch(engine, images, labels, step)
        accuracy = evaluate(engine, held_out_images, held_out_labels)
        if dist.get_rank() == 0:
            print(f"epoch {step}/{args.epochs}: loss {loss:.4f}, held-out accuracy {accuracy:.4f}")
            tracker.log({"loss": loss, "accuracy": accuracy}, step=step)
            tracker.progress(step, total=args.epochs)
        save(engine, step)
    accuracy = evaluate(engine, held_out_images, held_out_labels)
    if dist.get_rank() == 0:
        print(f"accuracy: {accuracy:.4f}")
    engine.destroy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument(
        "--local_rank", type=int, default=os.environ["LOCAL_RANK"], help="given by the deepspeed command"
    )
    deepspeed.init_distributed("gloo" if os.environ.get("DS_ACCELERATOR") == "cpu" else None)
    train(deepspeed.add_config_arguments(parser).parse_args())
    # Gloo's threads outlive the group; one that still holds a tensor of ours would abort the interpreter's exit.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
