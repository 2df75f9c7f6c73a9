"""Strategies by a word."""

from __future__ import annotations

import os

from trainkit.errors import InvalidSetup
from trainkit.strategies.base import Strategy
from trainkit.strategies.ddp import DDP
from trainkit.strategies.deepspeed import DeepSpeed
from trainkit.strategies.fsdp import FSDP
from trainkit.strategies.single import Single

WORDS = ("auto", "single", "ddp", "fsdp", "deepspeed")


def strategy(value: Strategy | str) -> Strategy:
    """The strategy that a word stands for.

    Raises:
        InvalidSetup: no strategy has this name.
    """
    if isinstance(value, Strategy):
        return value
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if value == "ddp" or (value == "auto" and several):
        return DDP()
    if value in ("single", "auto"):
        return Single()
    if value == "fsdp":
        return FSDP()
    if value == "deepspeed":
        return DeepSpeed()
    raise InvalidSetup(f"strategy={value!r}: choose one of {', '.join(WORDS)}, or give a Strategy")
