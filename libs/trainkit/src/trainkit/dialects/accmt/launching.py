"""How a script that does not say it is run: strategy and precision from outside, as a launcher gives them."""

from __future__ import annotations

import os
import re
import warnings
from dataclasses import dataclass
from typing import Any, Literal, cast

from trainkit.errors import InvalidSetup
from trainkit.strategies.base import Strategy
from trainkit.strategies.ddp import DDP
from trainkit.strategies.deepspeed import DeepSpeed
from trainkit.strategies.named import strategy

VARIABLE = "TRAINKIT_STRATEGY"
_FORM = re.compile(r"(auto|single|ddp|fsdp|deepspeed-([0-3]))(?:-(fp32|bf16|fp16))?")

Precision = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True)
class Launch:
    """What runs the steps, and in which format."""

    strategy: Strategy
    precision: Precision

    @property
    def casts(self) -> bool:
        """Whether batches have to come in the format of the computation."""
        return isinstance(self.strategy, DeepSpeed) and self.precision != "fp32"


def checked(text: str) -> re.Match[str]:
    """A strategy's name in its parts.

    Raises:
        InvalidSetup: it is none; says how they are written.
    """
    found = _FORM.fullmatch(text)
    if found is None:
        raise InvalidSetup(
            f"no strategy is called {text!r}: write auto, single, ddp, fsdp or deepspeed-0 to deepspeed-3, and behind "
            "it -bf16 or -fp16 if wanted, as in deepspeed-2-bf16"
        )
    return found


def launch(settings: Any, world: int) -> Launch:
    """What the variable `TRAINKIT_STRATEGY` asks for, with what the trainer's settings say about it."""
    parts = checked(os.environ.get(VARIABLE, "auto"))
    precision = cast(Precision, parts[3] or "fp32")
    if parts[2] is not None:
        stage = cast(Literal[0, 1, 2, 3], int(parts[2]))
        return Launch(DeepSpeed(stage=stage, quiet=not settings.enable_prepare_logging), precision)
    chosen = strategy(parts[1])
    if isinstance(chosen, DDP) and not settings.safe_mode:
        if world > 1:
            warnings.warn(
                "safe_mode=False: steps run past the wrapper of torch; gradients are averaged all the same, later",
                stacklevel=2,
            )
        chosen = DDP(wrapped=False)
    return Launch(chosen, precision)
