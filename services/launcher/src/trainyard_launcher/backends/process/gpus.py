"""Devices of this machine, handed out whole: a device belongs to one node of one attempt at a time."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping

logger = logging.getLogger(__name__)


class NotEnoughGpus(Exception):
    """More devices were asked for than are free."""


class Gpus:
    """The devices.

    Args:
        indices: of the devices, as the driver counts them.
    """

    def __init__(self, indices: Iterable[int]) -> None:
        self.indices = tuple(indices)
        self._owners: dict[int, str] = {}

    def take(self, attempt_id: str, counts: Iterable[int]) -> list[tuple[int, ...]]:
        """Devices for the nodes of an attempt, all or none.

        Raises:
            NotEnoughGpus: fewer are free; nothing was taken.
        """
        counts = list(counts)
        free = [index for index in self.indices if index not in self._owners]
        if sum(counts) > len(free):
            owners = ", ".join(f"{index}: {owner}" for index, owner in sorted(self._owners.items())) or "nobody"
            raise NotEnoughGpus(
                f"{sum(counts)} GPUs are needed and {len(free)} of {len(self.indices)} are free (held by {owners})"
            )
        shares = []
        for count in counts:
            shares.append(tuple(free[:count]))
            free = free[count:]
        self.hold(attempt_id, (index for share in shares for index in share))
        return shares

    def hold(self, attempt_id: str, indices: Iterable[int]) -> None:
        """Marks devices as an attempt's: it was given them by an earlier life of the launcher."""
        self._owners.update(dict.fromkeys(indices, attempt_id))

    def release(self, attempt_id: str) -> None:
        """All devices of an attempt are free again."""
        self._owners = {index: owner for index, owner in self._owners.items() if owner != attempt_id}


def detect(environ: Mapping[str, str] = os.environ) -> list[int]:
    """Indices of the NVIDIA devices this process may use: all, or those that CUDA_VISIBLE_DEVICES names."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver, so no device
        return []
    try:
        uuids = [
            pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(pynvml.nvmlDeviceGetCount())
        ]
    finally:
        pynvml.nvmlShutdown()
    return visible(
        [uuid if isinstance(uuid, str) else uuid.decode() for uuid in uuids], environ.get("CUDA_VISIBLE_DEVICES")
    )


def visible(uuids: list[str], wanted: str | None) -> list[int]:
    """Indices of the devices a value of CUDA_VISIBLE_DEVICES leaves; like CUDA, it ends at the first unknown name."""
    if wanted is None:
        return list(range(len(uuids)))
    indices = []
    for name in filter(None, (part.strip() for part in wanted.split(","))):
        matches = [int(name)] if name.isdigit() else [i for i, uuid in enumerate(uuids) if uuid.startswith(name)]
        if len(matches) != 1 or matches[0] >= len(uuids):
            break
        indices.append(matches[0])
    return indices
