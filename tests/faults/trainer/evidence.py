"""What the training script of the fault tests logs, prints and saves: a known function of seed, attempt, rank and step.

The script keeps a diary of the steps it came to, so that whoever checks what was stored knows what was sent, whatever
was killed. The standard library alone: script and checker both import this file, and nothing of the services.

    <folder>/<attempt>-<rank>.diary    the steps, each an i64 written before the step is logged; END after the last
    <folder>/enough                    made by a test: end at the next checkpoint
"""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

TRAIN_NAMES = tuple(f"train/value-{number}" for number in range(8))
VALIDATION_NAMES = ("validation/loss", "validation/accuracy")
VALIDATE_EVERY = 10
PRINT_EVERY = 25
SAVE_EVERY = 500
WEIGHTS_BYTES = 300_000
END = -1
ENOUGH = "enough"
PREFIX = "evidence:"
"""Of every line that is checked; the agent and Python have lines of their own."""

_STEP = struct.Struct("<q")
_SPECIAL = (
    0x7FF8_0000_0000_0000,  # NaN
    0xFFF8_0000_DEAD_BEEF,  # a negative NaN with a payload
    0x7FF0_0000_0000_0000,  # infinity
    0xFFF0_0000_0000_0000,  # minus infinity
    0x8000_0000_0000_0000,  # minus zero
    0x0000_0000_0000_0001,  # the least number above zero
    0x000F_FFFF_FFFF_FFFF,  # the greatest subnormal
    0x7FEF_FFFF_FFFF_FFFF,  # the greatest number
)


def train_values(seed: int, attempt: int, rank: int, step: int) -> tuple[float, ...]:
    """The row that every step logs: any bits there are, and one of the special values in turn."""
    digest = bytearray(blake2b(b"%d %d %d %d" % (seed, attempt, rank, step), digest_size=8 * len(TRAIN_NAMES)).digest())
    for high in range(7, len(digest), 8):
        digest[high] &= 0xBF  # keeps random bits from being a NaN by chance: those have their own turn
    _, special = step % len(TRAIN_NAMES), _SPECIAL[step // len(TRAIN_NAMES) % len(_SPECIAL)]
    struct.pack_into("<Q", digest, 8 * (step % len(TRAIN_NAMES)), special)
    return struct.unpack(f"<{len(TRAIN_NAMES)}d", digest)


def validation_values(seed: int, attempt: int, rank: int, step: int) -> tuple[float, ...]:
    """The further row of every `VALIDATE_EVERY`th step."""
    generator = random.Random(f"{seed} {attempt} {rank} {step}")
    return generator.random(), -generator.random()


def line(seed: int, attempt: int, rank: int, step: int) -> str:
    """What every `PRINT_EVERY`th step prints."""
    return f"{PREFIX} {seed} {attempt} {rank} {step} ünïcode"


def weights(seed: int, step: int) -> bytes:
    """The checkpoint of a step. Half of it is the same at every step, as in a model with frozen layers."""
    frozen = random.Random(seed).randbytes(WEIGHTS_BYTES // 2)
    return frozen + random.Random(f"{seed} {step}").randbytes(WEIGHTS_BYTES // 2)


def checkpoint_name(step: int) -> str:
    return f"step-{step}.bin"


class Diary:
    """Written by one worker. A write to the page cache survives the death of every process."""

    def __init__(self, folder: Path, attempt: int, rank: int) -> None:
        path = folder / f"{attempt}-{rank}.diary"
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)

    def step(self, step: int) -> None:
        os.write(self._fd, _STEP.pack(step))


@dataclass(frozen=True, slots=True)
class Told:
    """What the diary of one worker says.

    Attributes:
        steps: those it came to, in order.
        complete: it ended by itself, so that the last step was logged for certain.
    """

    attempt: int
    rank: int
    steps: tuple[int, ...]
    complete: bool

    @property
    def certain(self) -> tuple[int, ...]:
        """Steps that were logged for certain: of the last one nobody knows, when the worker was killed."""
        return self.steps if self.complete else self.steps[:-1]


def read_diaries(folder: Path) -> Iterator[Told]:
    """The diaries of all workers so far, by attempt and rank."""
    for path in sorted(folder.glob("*.diary")):
        attempt, rank = map(int, path.stem.split("-"))
        data = path.read_bytes()
        steps = tuple(step for (step,) in _STEP.iter_unpack(data[: len(data) // _STEP.size * _STEP.size]))
        complete = bool(steps) and steps[-1] == END
        yield Told(attempt, rank, steps[:-1] if complete else steps, complete)


def steps_told(folder: Path) -> int:
    """How many steps all workers together came to."""
    return sum(path.stat().st_size for path in folder.glob("*.diary")) // _STEP.size
