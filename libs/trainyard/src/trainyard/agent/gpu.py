"""Devices through NVML. The library is loaded only by jobs that were given a device: the agent has to stay small."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class Gpus:
    """Reads utilisation and memory of devices by index."""

    def __init__(self, indices: Iterable[int]) -> None:
        """
        Raises:
            OSError: the job has devices, but NVML does not answer.
        """
        self._handles: dict[int, Any] = {}
        indices = tuple(indices)
        if not indices:
            return
        import pynvml

        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            self._handles = {index: pynvml.nvmlDeviceGetHandleByIndex(index) for index in indices}
        except pynvml.NVMLError as error:
            raise OSError(f"NVML: {error}") from error

    def read(self, index: int) -> tuple[float, int] | None:
        """Utilisation from 0 to 1, and bytes in use; zeros for a device that fell silent; None: it cannot be read."""
        handle = self._handles.get(index)
        if handle is None:
            return None
        try:
            utilisation = self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
            return utilisation, int(self._nvml.nvmlDeviceGetMemoryInfo(handle).used)
        except self._nvml.NVMLError:
            return 0.0, 0
