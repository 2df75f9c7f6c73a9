"""Random numbers that can be stored, read back, and given out by place instead of by time.

`mixed(seed, epoch, batch)` gives every place its own seed, so what is random there does not depend on what ran before,
on the number of workers, or on a restart.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor


def mixed(*parts: int) -> int:
    """A 63-bit seed out of whole numbers; different parts give unrelated seeds."""
    packed = struct.pack(f"<{len(parts)}q", *parts)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


def seed_everything(seed: int) -> None:
    """Seeds Python, NumPy and torch, on every device of this process."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def capture(device: torch.device) -> dict[str, Tensor]:
    """The state of all generators as tensors of bytes and numbers."""
    _, words, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, numbers, spare = random.getstate()
    state = {
        "torch": torch.get_rng_state(),
        "numpy": torch.from_numpy(np.asarray(words, dtype=np.int64)),
        "numpy_position": torch.tensor([float(position), float(has_gauss), float(gauss)], dtype=torch.float64),
        "python": torch.tensor(numbers, dtype=torch.int64),
        "python_spare": torch.tensor([version, spare is not None, spare or 0.0], dtype=torch.float64),
    }
    if device.type != "cpu":
        state["device"] = torch.get_device_module(device).get_rng_state(device)
    return state


def restore(state: Mapping[str, Tensor], device: torch.device) -> None:
    """Puts all generators back where `capture` found them."""
    torch.set_rng_state(state["torch"])
    position, has_gauss, gauss = state["numpy_position"].tolist()
    np.random.set_state(("MT19937", state["numpy"].numpy().astype(np.uint32), int(position), int(has_gauss), gauss))
    version, has_spare, spare = state["python_spare"].tolist()
    random.setstate((int(version), tuple(state["python"].tolist()), spare if has_spare else None))
    if "device" in state and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(state["device"], device)


def seed_here(seed: int) -> None:
    """Seeds this process's generators on the host, cheaply; those of devices are left alone."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


class Generators:
    """Host generators of something's own: within `with`, this process's go on from where the last such block ended;
    afterwards they are as before."""

    def __init__(self, seed: int) -> None:
        self.seed(seed)

    def seed(self, seed: int) -> None:
        """Starts from `seed`. Not within the block."""
        with seeded(seed):
            self._own = _raw()

    def __enter__(self) -> None:
        self._before = _raw()
        _put(self._own)

    def __exit__(self, *error: object) -> None:
        self._own = _raw()
        _put(self._before)

    def state_dict(self) -> dict[str, Tensor]:
        """Their state, as `capture` returns it."""
        with self:
            return capture(torch.device("cpu"))

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes over what `state_dict` returned."""
        with self:
            restore(state, torch.device("cpu"))


def _raw() -> tuple[Any, ...]:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def _put(state: tuple[Any, ...]) -> None:
    torch.set_rng_state(state[0])
    np.random.set_state(state[1])
    random.setstate(state[2])


@contextmanager
def unchanged() -> Iterator[None]:
    """Host generators are after the block as they were before it."""
    before = _raw()
    try:
        yield
    finally:
        _put(before)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Host generators start from `seed` within the block, and are as before after it."""
    with unchanged():
        seed_here(seed)
        yield
