"""Trains nothing, but logs, prints and saves as training does, and keeps a diary. Ranks meet at checkpoints."""

import os
import re
import sys
import time
from itertools import count
from pathlib import Path

from evidence import (
    END,
    ENOUGH,
    PRINT_EVERY,
    SAVE_EVERY,
    TRAIN_NAMES,
    VALIDATE_EVERY,
    VALIDATION_NAMES,
    Diary,
    checkpoint_name,
    line,
    train_values,
    validation_values,
    weights,
)
from trainyard import tracker

FOLDER = Path(os.environ["EVIDENCE"])
SEED = int(os.environ["SEED"])
PAUSE_S = float(os.environ["PAUSE_S"])
ATTEMPT = int(os.environ["TRAINYARD_ATTEMPT"])
RANK = int(os.environ["RANK"])
WORLD_SIZE = int(os.environ["WORLD_SIZE"])


def main() -> None:
    resumed = re.search(r"step-(\d+)", os.environ.get("TRAINYARD_RESUME_FROM", ""))
    diary = Diary(FOLDER, ATTEMPT, RANK)
    for step in count(int(resumed[1]) + 1 if resumed else 1):
        diary.step(step)
        take(step)
        time.sleep(PAUSE_S)
        if step % SAVE_EVERY == 0 and checkpoint(step):
            break
    diary.step(END)


def take(step: int) -> None:
    who = (SEED, ATTEMPT, RANK, step)
    if step % PRINT_EVERY == 0:
        sys.stdout.write(line(*who) + "\n")
        sys.stdout.flush()
    if step % VALIDATE_EVERY == 0:
        tracker.log(dict(zip(VALIDATION_NAMES, validation_values(*who), strict=True)), step=step)
    tracker.log(dict(zip(TRAIN_NAMES, train_values(*who), strict=True)), step=step)


def checkpoint(step: int) -> bool:
    """Saves, with all ranks at the same step; whether this is the end, as rank 0 decides."""
    (FOLDER / f"{ATTEMPT}-{step}-{RANK}.here").touch()
    decision = FOLDER / f"{ATTEMPT}-{step}.decision"
    if RANK == 0:
        for rank in range(WORLD_SIZE):
            await_file(FOLDER / f"{ATTEMPT}-{step}-{rank}.here")
        enough = (FOLDER / ENOUGH).exists()
        save(Path("checkpoints"), checkpoint_name(step), weights(SEED, step))
        if enough:
            save(Path("exports"), "model.bin", weights(SEED, step))
        save(FOLDER, decision.name, b"enough" if enough else b"")
    await_file(decision)
    return decision.read_bytes() == b"enough"


def save(folder: Path, name: str, data: bytes) -> None:
    """There completely, or not at all."""
    folder.mkdir(exist_ok=True)
    draft = folder / f".{name}"
    draft.write_bytes(data)
    draft.rename(folder / name)


def await_file(path: Path) -> None:
    while not path.exists():
        time.sleep(0.001)


main()
