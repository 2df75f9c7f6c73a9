"""A classifier with parameters in its root and in a unit that FSDP gathers by itself."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.head = nn.Linear(8, 3)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(self.head(self.layers(batch[0])), batch[1])
