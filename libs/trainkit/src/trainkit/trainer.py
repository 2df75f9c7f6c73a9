"""`Trainer`: what a run is made of. `fit` runs it; `trainkit.loop.fit` is the loop itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainkit.callbacks.base import Callback
from trainkit.checkpoints.policy import Checkpoints
from trainkit.durations import AnyDuration
from trainkit.metrics.base import Metric
from trainkit.trackers.base import Tracker

if TYPE_CHECKING:
    import torch

    from trainkit.initial.weights import Weights
    from trainkit.loop.fit import Fit
    from trainkit.strategies.base import Strategy


@dataclass(frozen=True, slots=True)
class Totals:
    """How long a run will be, for schedules that have to know. `epochs` and `updates` are rounded up."""

    updates: int
    epochs: int
    updates_per_epoch: int


OptimizerFactory: TypeAlias = Callable[[list[tuple[str, Parameter]]], Optimizer]
"""Makes the optimizer from named parameters, for instance `partial(torch.optim.AdamW, lr=1e-3)`. Called once the module
is where its strategy wants it, because sharding replaces parameters."""

ScheduleFactory: TypeAlias = Callable[[Optimizer, Totals], LRScheduler]
"""Makes the schedule, for instance `lambda optimizer, totals: CosineAnnealingLR(optimizer, totals.updates)`."""


@dataclass(kw_only=True)
class Trainer:
    """All parts of a run.

        trainer = Trainer(
            module=Digits(),
            optimizer=partial(torch.optim.AdamW, lr=1e-3),
            train=Loader(images, batch_size=64),
            evaluate=Loader(held_out, batch_size=256, shuffle=False),
            max_duration="10ep",
        )
        trainer.fit()

    Args:
        module: has a `training_step(batch)`; see `trainkit.module`. Or what makes it, `Net` or `partial(Net, 12)`: it
            is called with generators that start from `seed`, and where parameters are sharded no process needs memory
            for all of it. A module on the meta device is initialised by its submodules' `reset_parameters`.
        optimizer: makes the optimizer from named parameters.
        train: a `Loader`, or any iterable of batches, gone through once per epoch.
        max_duration: where training ends.
        schedule: makes the learning-rate schedule. It is called once more when a resumed run has other settings.
        schedule_per: how often the schedule steps.
        schedule_total: the duration that the schedule is planned for; then the rate stays. None: `max_duration`.
        schedule_monitor: the result of evaluations that `ReduceLROnPlateau` steps with, for instance `val/loss`.
        evaluate: evaluation sets by name; a single one is called `val`.
        evaluate_every: how often; None never, but see `evaluate_last`.
        evaluate_first: also before the first step of a fresh run.
        evaluate_last: also at the end, unless that was just done.
        metrics: by the name under which `evaluation_step` returns their values; results are called `SET/NAME`.
        weights: what the module starts with: a safetensors file, a folder of them, a checkpoint of trainkit, or
            `Weights(path, ...)`. A process reads what it keeps. A run that is resumed takes its checkpoint's.
        strategy: `auto` (DDP when there are several processes, else single), `single`, `ddp`, `fsdp`,
            `deepspeed`, or a `Strategy`.
        precision: of the computation; weights stay in 32 bits.
        accumulate: steps whose gradients make one update.
        clip_norm: greatest norm of the gradient over all parameters; None does not clip.
        callbacks: called in this order.
        trackers: where numbers go.
        log_every: how often the mean training loss (`train/loss`) goes to trackers; None never.
        checkpoints: the policy; None makes none.
        on_change: settings that may differ from those of the checkpoint that the run resumes from, for instance
            `{"seed": "accept"}`. Any of `seed`, `shuffle`, `order`, `samples`, `batch_size`, `drop_last`, `accumulate`.
            `{"batch_size": "scale"}` accepts another one if it is as large per process as before.
        seed: of everything random.
        device: None takes this process's accelerator, else the CPU; with several processes, "cuda" is each one's own.
        compile: compiles the module's forward; a mapping gives `torch.compile`'s arguments.
        recompute: classes of submodules whose activations are recomputed in the backward pass to save memory.
        deterministic: refuses operations that are not repeatable bit for bit.
        non_finite: `raise` looks at the mean loss whenever it is logged and before a checkpoint; `skip` looks at every
            gradient and leaves out the update; `ignore` looks at nothing.
        out_of_memory: `raise`; or `retry` a step once after what could be freed was freed; or `split` the batch in
            halves until it fits (needs batches that are tensors, sequences or mappings of tensors along their first
            dimension).
        place_batches: moves batches to the device; False leaves that to the module.
        cast_batches: gives floating tensors of a batch the computation's format.
        zero_gradients: after an update gradients become zeros instead of None: an optimizer then goes on with what a
            step did not use, and memory stays taken.
        check_sync_every: how often processes compare their weights; None never.
        name: of the run, for trackers.
        parameters: plain settings that trackers store with the run.
    """

    module: nn.Module | Callable[[], nn.Module]
    optimizer: OptimizerFactory
    train: Iterable[Any]
    max_duration: AnyDuration
    schedule: ScheduleFactory | None = None
    schedule_per: Literal["update", "epoch"] = "update"
    schedule_total: AnyDuration | None = None
    schedule_monitor: str | None = None
    evaluate: Mapping[str, Iterable[Any]] | Iterable[Any] | None = None
    evaluate_every: AnyDuration | None = "1ep"
    evaluate_first: bool = False
    evaluate_last: bool = True
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    weights: Weights | str | Path | None = None
    strategy: Strategy | str = "auto"
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    accumulate: int = 1
    clip_norm: float | None = None
    callbacks: Sequence[Callback] = ()
    trackers: Sequence[Tracker] = ()
    log_every: AnyDuration | None = "10st"
    checkpoints: Checkpoints | None = None
    on_change: Mapping[str, Literal["accept", "scale"]] = field(default_factory=dict)
    seed: int = 0
    device: torch.device | str | None = None
    compile: bool | Mapping[str, Any] = False
    recompute: Sequence[type[nn.Module]] = ()
    deterministic: bool = False
    non_finite: Literal["raise", "skip", "ignore"] = "raise"
    out_of_memory: Literal["raise", "retry", "split"] = "raise"
    place_batches: bool = True
    cast_batches: bool = False
    zero_gradients: bool = False
    check_sync_every: AnyDuration | None = None
    name: str = "run"
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def fit(self) -> Fit:
        """Trains until `max_duration`, going on from a checkpoint when the policy says so.

        Returns:
            The finished `Fit`: its `state`, `module` and `results`.

        Raises:
            InvalidSetup: parts do not go together; nothing was trained.
            Interrupted: SIGTERM asked for the end; a last checkpoint was written.
            TrainkitError: see `trainkit.errors`.
        """
        from trainkit.loop.fit import Fit

        fit = Fit(self)
        fit.run()
        return fit
