"""One `fit` of the dialect as one run of trainkit's trainer."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

import trainkit
from trainkit.callbacks import FreeMemory, Summary
from trainkit.checkpoints.policy import Checkpoints
from trainkit.dialects.accmt import checks, loaders, resuming, saving
from trainkit.dialects.accmt.callbacks import Hooks
from trainkit.dialects.accmt.extended import ExtendedAcceleratorModule, engine
from trainkit.dialects.accmt.freezing import Freezing
from trainkit.dialects.accmt.hyperparameters import HyperParameters, name_of
from trainkit.dialects.accmt.launching import launch
from trainkit.dialects.accmt.metrics import Metric, Routed, by_set
from trainkit.dialects.accmt.module import AcceleratorModule, check
from trainkit.dialects.accmt.progress import Progress
from trainkit.dialects.accmt.series import Series
from trainkit.dialects.accmt.utility import IS_CPU
from trainkit.errors import InvalidSetup
from trainkit.trackers import JsonLines, MLflow, Tracker

if TYPE_CHECKING:
    from trainkit.dialects.accmt.trainer import Trainer
    from trainkit.trainer import OptimizerFactory, ScheduleFactory, Totals


def run(trainer: Trainer, module: AcceleratorModule, train_dataset: Any, val_dataset: Any) -> dict[str, float]:
    """Makes trainkit's trainer and lets it fit. Returns the last evaluation's results."""
    settings, hps = trainer.settings, trainer.hps
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    train_size, val_size = hps.batch_sizes
    train = loaders.train_loader(module, train_dataset, settings, train_size, world)
    sets = loaders.validation_loaders(module, val_dataset, settings, val_size, world)
    check(module, evaluated=bool(sets))
    metrics = by_set(settings.metrics, list(sets))
    _prepare_model(module, settings)
    trainer.written_state.reset()
    module.state, module.log_every = trainer.state, settings.log_every
    series = _series(trainer, sets)
    module.tracker = series
    chosen = launch(settings, world)
    manual = isinstance(module, ExtendedAcceleratorModule)
    if manual and (settings.grad_accumulation_steps or 1) > 1:
        warnings.warn("grad_accumulation_steps is ignored: the module updates by itself", stacklevel=3)
    accumulate = 1 if manual else settings.grad_accumulation_steps or 1
    log_steps = _log_steps(settings, accumulate)
    progress = Progress(module, trainer.written_state, series, trainer.monitor, log_steps, hps.max_steps)
    routed = _routed(metrics, trainer)
    for callback in trainer.callbacks:
        callback.module, callback.state, callback.trainer = module, trainer.state, trainer
    hooks = Hooks(trainer.callbacks, trainer.written_state, progress, manual=manual)
    fit = trainkit.Trainer(
        module=engine(
            module, trainer.written_state, {name: set(each._metrics) for name, each in routed.items()}, hooks
        ),
        optimizer=_optimizer(module, hps),
        schedule=_schedule(module, hps),
        schedule_per="epoch" if hps.step_scheduler_per_epoch else "update",
        train=train,
        evaluate=sets or None,
        max_duration=hps.max_duration,
        evaluate_every=_steps(settings.evaluate_every_n_steps) or "1ep",
        evaluate_first=settings.eval_when_start and bool(sets),
        evaluate_last=settings.eval_when_finish or settings.evaluate_every_n_steps is None,
        metrics=routed,
        accumulate=accumulate,
        strategy=chosen.strategy,
        device="cpu" if IS_CPU else None,
        precision=chosen.precision,
        place_batches=settings.batch_device_placement,
        cast_batches=settings.prepare_batch and chosen.casts,
        zero_gradients=not settings.set_to_none,
        clip_norm=settings.clip_grad,
        callbacks=[
            progress,
            Freezing(module),
            *_savings(trainer, metrics, progress),
            FreeMemory(_steps(settings.cleanup_cache_every_n_steps)),
            Summary(),
            hooks,
        ],
        trackers=[series],
        log_every=_log_every(log_steps),
        checkpoints=_checkpoints(trainer, sets),
        on_change=trainer.on_change,
        out_of_memory="retry" if settings.safe_steps and chosen.strategy.works_alone and not manual else "raise",
        name=trainer.track_name,
        parameters={**parameters(trainer), **(settings.additional_tracker_config or {})},
    ).fit()
    return dict(fit.results)


def _prepare_model(module: AcceleratorModule, settings: Any) -> None:
    if settings.gradient_checkpointing:
        enable = getattr(module.model, "gradient_checkpointing_enable", None)
        if enable is None:
            warnings.warn(
                f"gradient_checkpointing=True has no effect: {type(module.model).__name__} has no method "
                "gradient_checkpointing_enable",
                stacklevel=4,
            )
        else:
            enable(gradient_checkpointing_kwargs=settings.gradient_checkpointing_kwargs)
    if settings.compile:
        for model in filter(None, (module.model, module.teacher)):
            model.compile(**(settings.compile_kwargs or {}))


def _optimizer(module: AcceleratorModule, hps: Any) -> OptimizerFactory:
    own: Any = module.get_optimizer()
    if own is None:
        return hps.make_optimizer()  # type: ignore[no-any-return]
    if not isinstance(own, Optimizer):
        raise TypeError(f"get_optimizer has to return a torch optimizer, not a {type(own).__name__}")
    made: Optimizer = own
    return lambda named: made


def _schedule(module: AcceleratorModule, hps: HyperParameters) -> ScheduleFactory | None:
    """The module's own schedule, else that of the hyperparameters."""
    if type(module).get_scheduler is AcceleratorModule.get_scheduler:
        return hps.make_schedule()

    def make(optimizer: Optimizer, totals: Totals) -> LRScheduler:
        if hps.step_scheduler_per_epoch:
            counts = 1, totals.epochs
        else:
            counts = (totals.updates, 1) if hps.max_steps else (totals.updates_per_epoch, totals.epochs)
        own: Any = module.get_scheduler(optimizer, *counts)
        if not isinstance(own, LRScheduler):
            raise TypeError(f"get_scheduler has to return a schedule of torch, not a {type(own).__name__}")
        return own

    return make


def _steps(count: int | None) -> str | None:
    return None if count is None else f"{count}st"


def _log_steps(settings: Any, accumulate: int) -> int | None:
    """`log_every` in steps, of which `accumulate` make an update; 0: at the end of each epoch; None: never."""
    if settings.log_every is None:
        return None
    return 0 if settings.log_every == -1 else settings.log_every * accumulate


def _log_every(steps: int | None) -> str | None:
    return None if steps is None else f"{steps}st" if steps else "1ep"


def _series(trainer: Trainer, sets: Mapping[str, Any]) -> Series:
    settings = trainer.settings
    trackers: list[Tracker] = [JsonLines(trainer.folder / "metrics.jsonl")]
    if settings.log_with == "mlflow":
        trainer.tracker = _mlflow(trainer)
        trackers.append(trainer.tracker)
    names = {"train_loss": settings.train_loss_metric_name, "val_loss": settings.val_loss_metric_name}
    files, trainer.waiting_artifacts = trainer.waiting_artifacts, []
    return Series(trackers, trainer.monitor, **names, sets=list(sets), files=files)


def _mlflow(trainer: Trainer) -> MLflow:
    """A folder keeps a database and the files of runs; `http://host` and `host:port` are servers."""
    place, options = str(trainer.settings.logging_dir), {"experiment": trainer.track_name, **trainer.run_arguments}
    if place.startswith(("http://", "https://")):
        return MLflow(place, **options)
    if place.replace(".", "").replace(":", "").isdigit():
        return MLflow(f"http://{place}", **options)
    folder = Path(place).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    return MLflow(f"sqlite:///{folder / 'mlflow.db'}", artifacts=folder / "artifacts", **options)


def _routed(metrics: Mapping[str, Mapping[str, Metric]], trainer: Trainer) -> dict[str, Routed]:
    names = dict.fromkeys(name for named in metrics.values() for name in named)
    return {
        name: Routed(name, {key: named[name] for key, named in metrics.items() if name in named}, trainer.written_state)
        for name in names
    }


def _savings(trainer: Trainer, metrics: Mapping[str, Mapping[str, Metric]], progress: Progress) -> list[saving.Saving]:
    settings = trainer.settings
    rules = {saving.VALID if metrics else saving.TRAIN: (None, None), **trainer.rules}
    patience = saving.patience_of(settings.patience, list(rules))
    return [
        saving.Saving(
            label,
            saving.rule_of(label, metrics, *limits),
            trainer.folder,
            save=not settings.disable_model_saving,
            patience=patience[label],
            state=trainer.written_state,
            progress=progress,
            max_shard_bytes=checks.shard_bytes(settings.max_shard_size),
        )
        for label, limits in rules.items()
    ]


def _checkpoints(trainer: Trainer, sets: Mapping[str, Any]) -> Checkpoints | None:
    settings = trainer.settings
    every = checks.checkpoint_every(settings.checkpoint_every)
    if not settings.enable_checkpointing or every is None:
        return None
    if every.unit == "ev" and not sets:
        raise InvalidSetup(f"checkpoint_every={settings.checkpoint_every!r} needs validation data")
    folder = trainer.folder / "checkpoints"
    kept = (settings.max_checkpoints or 10**9) if settings.multiple_checkpoints else 1
    return Checkpoints(
        folder=folder,
        every=every,
        keep_last=kept,
        asynchronous=False,  # a hook is told of a checkpoint at its own step, as scripts of this dialect expect
        at_end=trainer.hps.max_steps is not None and every.unit == "ep",  # it ends its last epoch
        resume=resuming.chosen(settings.resume, folder),
    )


def parameters(trainer: Trainer) -> dict[str, Any]:
    """The run's own parameters, as trackers get them."""
    hps = trainer.hps
    return {
        "epochs": hps.epochs,
        "max_steps": hps.max_steps,
        "batch_size": hps.batch_sizes[0],
        "eval_batch_size": hps.batch_sizes[1],
        "optimizer": name_of(hps.optimizer),
        "scheduler": None if hps.scheduler is None else name_of(hps.scheduler),
        **(hps.optim_kwargs or {}),
        **{f"scheduler.{name}": value for name, value in (hps.scheduler_kwargs or {}).items()},
        "grad_accumulation_steps": trainer.settings.grad_accumulation_steps or 1,
        "clip_grad": trainer.settings.clip_grad,
    }
