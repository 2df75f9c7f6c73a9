"""Train a small transformer, character by character, on the text of Python's own standard library.

Runs with `python train.py`, with `torchrun --nproc-per-node 2 train.py`, and as a job of the yard; killed and started
again, it goes on from its last checkpoint.
"""

import argparse
import sysconfig
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset
from trainkit import Checkpoints, Loss, Trainer
from trainkit.data import Loader
from trainkit.optim import schedule
from trainkit.trackers import Yard

CHARACTERS = 128  # ASCII; anything else is a 0
HELD_OUT = 10  # every tenth file


class Block(nn.Module):
    """Attention to what came before, then a layer for each place; keeps the shape (batch, time, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_layers = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.queries_keys_values(self.before_attention(x)).chunk(3, dim=-1)
        queries, keys, values = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.layers(self.before_layers(x))


class LanguageModel(nn.Module):
    def __init__(self, length: int, width: int, depth: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(CHARACTERS, width)
        self.places = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.Sequential(*(Block(width, heads=4) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CHARACTERS)

    def forward(self, text: Tensor) -> Tensor:
        """Logits of the next character, (batch, time, characters), for text of (batch, time)."""
        return self.head(self.norm(self.blocks(self.characters(text) + self.places[: text.shape[1]])))

    def training_step(self, text: Tensor) -> Loss:
        logits, following = self(text[:, :-1]), text[:, 1:]
        summed = F.cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="sum")
        return Loss(summed, following.numel())


class Windows(Dataset[Tensor]):
    """Pieces of a text, each `length` characters and the one after them."""

    def __init__(self, text: bytes, length: int) -> None:
        codes = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self._codes, self._length = codes * (codes < CHARACTERS), length

    def __len__(self) -> int:
        return (len(self._codes) - 1) // self._length

    def __getitem__(self, index: int) -> Tensor:
        return self._codes[index * self._length : (index + 1) * self._length + 1]


def read_library(megabytes: float) -> tuple[bytes, bytes]:
    """Text to train on and text held out, from the modules at the top of the standard library."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    train = b"".join(file.read_bytes() for number, file in enumerate(files) if number % HELD_OUT)
    held_out = b"".join(file.read_bytes() for file in files[::HELD_OUT])
    most = int(megabytes * 1e6)
    return train[:most], held_out[: most // HELD_OUT]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=64, help="characters that the model sees")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=32, help="of all workers together")
    parser.add_argument("--megabytes", type=float, default=2.0, help="of text")
    args = parser.parse_args()

    torch.manual_seed(0)
    train, held_out = (Windows(text, args.length) for text in read_library(args.megabytes))
    fit = Trainer(
        module=LanguageModel(args.length, args.width, args.depth),
        optimizer=partial(torch.optim.AdamW, lr=3e-3),
        schedule=schedule("CosineWithWarmup", num_warmup_steps=20),
        train=Loader(train, args.batch_size),
        evaluate=Loader(held_out, args.batch_size, shuffle=False),
        evaluate_every="100st",
        max_duration=f"{args.steps}st",
        clip_norm=1.0,
        checkpoints=Checkpoints(every="50st", keep_last=2),
        trackers=[Yard()],
        parameters=vars(args),
    ).fit()
    if fit.strategy.is_main:
        print(f"{fit.state.tokens} characters; held-out loss: {fit.results['val/loss']:.3f} nats a character")


if __name__ == "__main__":
    main()
