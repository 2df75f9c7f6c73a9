"""Accelerate going on in the middle of an epoch, as its documentation does it; in the environment of `trainers.txt`."""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    done = int(sys.argv[1])
    torch.manual_seed(0)
    torch.set_num_threads(1)
    module = nn.Linear(4, 1)
    accelerator = Accelerator(cpu=True)
    loader = DataLoader(TensorDataset(torch.randn(200_000, 4)), 2, shuffle=True)
    module, optimizer, loader = accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=0.01), loader)
    for (inputs,) in accelerator.skip_first_batches(loader, done):
        accelerator.backward(module(inputs).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        print(f"first new step {done + 1}", flush=True)
        return


if __name__ == "__main__":
    main()
