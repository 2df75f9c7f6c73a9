"""Number formats of the computation. Weights and optimizer state stay in 32 bits."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainkit.errors import InvalidSetup, InvalidStep

Format = Literal["fp32", "bf16", "fp16"]
_DTYPES: dict[object, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


FORMATS = ("fp32", "bf16", "fp16")


class Precision:
    """fp32; bf16 through autocast; fp16 through autocast with a loss scale that halves after an overflow.

    Raises:
        InvalidSetup: the format is not known.
    """

    def __init__(self, format: Format, device: torch.device) -> None:
        if not isinstance(format, str) or format not in FORMATS:
            raise InvalidSetup(f"precision={format!r}: choose one of {', '.join(FORMATS)}")
        self.format, self.dtype = format, _DTYPES[format]
        self.autocasts = format != "fp32"
        self._device = device
        self.scaler = torch.amp.GradScaler(device.type) if format == "fp16" else None

    def autocast(self) -> AbstractContextManager[Any]:
        """Within it, operations compute in this format where that is safe."""
        return torch.autocast(self._device.type, self.dtype)

    def backward(self, loss: Tensor, options: Mapping[str, Any]) -> None:
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        try:
            loss.backward(**options) if options else loss.backward()  # an empty mapping costs as much as a call
        except RuntimeError:
            if loss.requires_grad:
                raise
            raise InvalidStep(
                "training_step returned a loss without a gradient: it was detached or computed without gradients, or "
                "uses no parameter that is trained"
            ) from None

    def unscale(self, optimizer: Optimizer) -> None:
        """Gives gradients their true size before anything reads them."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> bool:
        if self.scaler is None:
            optimizer.step()
            return True
        before = self.scaler.get_scale()
        self.scaler.step(optimizer)
        self.scaler.update()
        return self.scaler.get_scale() >= before

    def state_dict(self) -> dict[str, Any]:
        """The loss scale and its history."""
        return self.scaler.state_dict() if self.scaler is not None else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.scaler is not None and state:
            self.scaler.load_state_dict(dict(state))
