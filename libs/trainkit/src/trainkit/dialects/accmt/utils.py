"""Small helpers."""

from __future__ import annotations

from trainkit.random import seed_everything


def set_seed(seed: int) -> None:
    """Seeds Python's, NumPy's and torch's random numbers. The order of data and a run's own numbers follow from the
    trainer's seed alone."""
    seed_everything(seed)
