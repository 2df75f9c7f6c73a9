"""What a run looks like from outside: rates, norms, speed, memory, load."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainkit.callbacks.base import Callback
from trainkit.durations import AnyDuration, Cadence
from trainkit.memory import resident_bytes

if TYPE_CHECKING:
    from trainkit.loop.fit import Fit

_GB = 1e9
log = logging.getLogger(__name__)


class Monitor(Callback):
    """Sends series about the run itself to the trackers, from the first process.

    | series | of |
    |---|---|
    | `lr`, or `lr/0`, `lr/1` | the learning rate of each parameter group |
    | `grad_norm` | the gradient's norm before clipping, over all processes |
    | `throughput/steps_per_s`, `/samples_per_s`, `/tokens_per_s` | all processes together, since the last row |
    | `memory/process_gb`, `/device_gb`, `/device_peak_gb` | gigabytes of 10^9 bytes |
    | `utilisation/cpu_percent`, `/device_percent` | of this process (100: one core), of the accelerator |
    | `epoch`, `checkpoints`, `skipped_updates` | counters |

    Args:
        every: how often a row is sent.
        learning_rate, grad_norm, throughput, memory, utilisation, counters: which series.
    """

    def __init__(
        self,
        every: AnyDuration = "10st",
        *,
        learning_rate: bool = True,
        grad_norm: bool = True,
        throughput: bool = True,
        memory: bool = True,
        utilisation: bool = False,
        counters: bool = False,
    ) -> None:
        self._every = every
        self._learning_rate, self._grad_norm, self._throughput = learning_rate, grad_norm, throughput
        self._memory, self._utilisation, self._counters = memory, utilisation, counters
        self._cadence: Cadence | None = None
        self._before = (0.0, 0.0, 0, 0, 0)

    def on_fit_start(self, fit: Fit) -> None:
        self._cadence = None
        if self._grad_norm:
            fit.need_grad_norm = True

    def on_epoch_start(self, fit: Fit) -> None:
        if self._cadence is None:
            self._cadence, self._before = Cadence(self._every, fit.state), _clocks(fit)

    def on_step_end(self, fit: Fit, loss: Tensor) -> None:
        assert self._cadence is not None
        if not self._cadence.due(fit.state) or not fit.strategy.is_main:
            return
        values: dict[str, float | Tensor] = {}
        if self._learning_rate:
            values |= _rates(fit)
        if self._grad_norm and fit.grad_norm is not None:
            values["grad_norm"] = fit.grad_norm
        if self._memory:
            values |= _memory(fit.strategy.device)
        if self._counters:
            state = fit.state
            values |= {"epoch": state.epoch, "checkpoints": state.checkpoints, "skipped_updates": state.skipped}
        fit.log(values | self._speeds(fit))

    def _speeds(self, fit: Fit) -> dict[str, float]:
        now, before = _clocks(fit), self._before
        self._before = now
        wall, cpu, steps, samples, tokens = (new - old for new, old in zip(now, before, strict=True))
        speeds: dict[str, float] = {}
        if self._throughput and wall > 0:
            speeds = {"throughput/steps_per_s": steps / wall, "throughput/samples_per_s": samples / wall}
            speeds |= {"throughput/tokens_per_s": tokens / wall} if tokens else {}
        if self._utilisation and wall > 0:
            speeds["utilisation/cpu_percent"] = 100 * cpu / wall
            speeds |= self._device_load(fit.strategy.device)
        return speeds

    def _device_load(self, device: torch.device) -> dict[str, float]:
        if device.type != "cuda":
            return {}
        try:
            return {"utilisation/device_percent": float(torch.cuda.utilization(device))}
        except (ModuleNotFoundError, RuntimeError) as error:
            log.warning("Monitor: the accelerator's load is not known: %s", error)
            self._utilisation = False
            return {}


def _clocks(fit: Fit) -> tuple[float, float, int, int, int]:
    state = fit.state
    return time.perf_counter(), time.process_time(), state.step, state.samples, state.tokens


def _rates(fit: Fit) -> dict[str, float]:
    rates = [float(group["lr"]) for group in fit.optimizer.param_groups]
    if len(set(rates)) == 1:
        return {"lr": rates[0]}
    return {f"lr/{at}": rate for at, rate in enumerate(rates)}


def _memory(device: torch.device) -> dict[str, float]:
    values = {"memory/process_gb": resident_bytes() / _GB}
    if device.type == "cuda":
        values["memory/device_gb"] = torch.cuda.memory_allocated(device) / _GB
        values["memory/device_peak_gb"] = torch.cuda.max_memory_allocated(device) / _GB
    return values
