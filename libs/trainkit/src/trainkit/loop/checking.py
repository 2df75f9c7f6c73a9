"""Refuses settings that cannot work, before anything is done: each message says what is allowed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from trainkit.callbacks.base import Callback
from trainkit.catalogue import nearest
from trainkit.checkpoints.policy import Checkpoints
from trainkit.data.counted import length_of
from trainkit.data.loader import Loader
from trainkit.durations import duration
from trainkit.errors import InvalidSetup
from trainkit.initial.weights import Weights
from trainkit.loop.parts import named_sets
from trainkit.loop.settings import CHECKPOINT_DECIDES
from trainkit.metrics.base import Metric
from trainkit.metrics.names import refuse_unknown
from trainkit.precision import FORMATS
from trainkit.trackers.base import Tracker
from trainkit.trainer import Trainer

_WORDS = {
    "schedule_per": ("update", "epoch"),
    "non_finite": ("raise", "skip", "ignore"),
    "out_of_memory": ("raise", "retry", "split"),
    "precision": FORMATS,
}
_FLAGS = ("evaluate_first", "evaluate_last", "deterministic", "place_batches", "cast_batches", "zero_gradients")
_CADENCES = ("evaluate_every", "log_every", "check_sync_every")


def check(trainer: Trainer) -> None:
    """Looks at every setting of a trainer.

    Raises:
        InvalidSetup: one cannot work, or two do not go together.
    """
    if not is_factory(trainer.module):
        _check_module(trainer.module)
    _check_flags(trainer)
    if is_factory(trainer.module):
        _check_factory(trainer.module)
    else:
        _check_compile(trainer, trainer.module)
    _check_weights(trainer.weights)
    for setting, allowed in _WORDS.items():
        if not isinstance(word := getattr(trainer, setting), str) or word not in allowed:
            raise InvalidSetup(f"{setting}={word!r}: choose one of {', '.join(allowed)}")
    _check_factories(trainer)
    _check_numbers(trainer)
    _check_data(trainer)
    _check_durations(trainer)
    _check_on_change(trainer)
    _check_members(trainer)
    _check_metrics(trainer)


def is_factory(module: Any) -> bool:
    """Whether it makes the module: a class or a function, and no module itself."""
    made = isinstance(module, nn.Module) or callable(getattr(module, "training_step", None))
    return isinstance(module, type) or (callable(module) and not made)


def _check_factory(factory: Any) -> None:
    try:
        inspect.signature(factory).bind()
    except ValueError:  # a built-in, which has no signature to ask
        return
    except TypeError as error:
        name = getattr(factory, "__name__", type(factory).__name__)
        raise InvalidSetup(
            f"module={name} makes the module and is called without arguments ({error}): give partial({name}, ...), or "
            f"an instance, {name}(...)"
        ) from None


def _check_weights(weights: Any) -> None:
    if weights is not None and not isinstance(weights, str | Path | Weights):
        raise InvalidSetup(
            f"weights is a {_kind(weights)}: give the path of a safetensors file, of a folder of them or of a "
            "checkpoint, or trainkit.Weights(path, ...)"
        )


def check_module(trainer: Trainer, module: Any) -> None:
    """Looks at the module of a run, when it was made.

    Raises:
        InvalidSetup: it cannot be trained with these settings.
    """
    _check_module(module)
    _check_compile(trainer, module)


def _check_compile(trainer: Trainer, module: Any) -> None:
    if trainer.compile and type(module).forward is nn.Module.forward:
        raise InvalidSetup(
            f"compile: {type(module).__name__} has no forward, which is what is compiled: give it "
            "one, and call self(...) in training_step"
        )


def _check_module(module: Any) -> None:
    if not callable(getattr(module, "training_step", None)):
        raise InvalidSetup(
            f"{type(module).__name__} has no training_step(batch): give it one that returns the loss of a batch"
        )
    if not isinstance(module, nn.Module):
        raise InvalidSetup(f"module is a {type(module).__name__}: give a torch.nn.Module")
    if lazy := [name for name, p in module.named_parameters() if is_lazy(p)]:
        raise InvalidSetup(
            f"{', '.join(lazy[:3])} of {type(module).__name__} has no shape yet: send one batch through the module "
            "before it is trained, so that every process and every checkpoint has the same parameters"
        )
    if not any(p.requires_grad for p in module.parameters()):
        raise InvalidSetup(f"nothing to train: no parameter of {type(module).__name__} requires a gradient")


def _check_flags(trainer: Trainer) -> None:
    """A text such as "false" would count as true."""
    for setting in _FLAGS:
        if not isinstance(given := getattr(trainer, setting), bool):
            raise InvalidSetup(f"{setting} has to be True or False, not {given!r}")
    if not isinstance(trainer.compile, bool | Mapping):
        raise InvalidSetup(f"compile={trainer.compile!r}: give True, False or a mapping of torch.compile's arguments")
    classes = trainer.recompute
    if not isinstance(classes, list | tuple) or not all(isinstance(each, type) for each in classes):
        raise InvalidSetup(f"recompute={classes!r}: give a list of classes of submodules, for instance [Block]")


def _check_factories(trainer: Trainer) -> None:
    if not callable(trainer.optimizer):
        raise InvalidSetup(
            f"optimizer is a {type(trainer.optimizer).__name__}: give what makes one from named parameters, for "
            "instance partial(torch.optim.AdamW, lr=1e-3)"
        )
    if trainer.schedule is not None and not callable(trainer.schedule):
        raise InvalidSetup(
            f"schedule is a {type(trainer.schedule).__name__}: give what makes one from the optimizer and Totals, for "
            "instance lambda optimizer, totals: CosineAnnealingLR(optimizer, totals.updates)"
        )
    made = trainer.schedule.func if isinstance(trainer.schedule, partial) else trainer.schedule
    if isinstance(made, type) and made.__module__.startswith("torch."):
        raise InvalidSetup(
            f"schedule is torch's {made.__name__}, and it is called with the optimizer and Totals, of which that class "
            f"knows nothing: give lambda optimizer, totals: {made.__name__}(optimizer, ...), or "
            "trainkit.optim.schedule with its name and arguments"
        )


def _check_numbers(trainer: Trainer) -> None:
    if not _whole(trainer.accumulate) or trainer.accumulate < 1:
        raise InvalidSetup(f"accumulate has to be a whole number of at least 1, not {trainer.accumulate!r}")
    if trainer.clip_norm is not None and (not _number(trainer.clip_norm) or not trainer.clip_norm > 0):
        raise InvalidSetup(
            f"clip_norm has to be a number greater than 0, not {trainer.clip_norm!r}; None does not clip"
        )
    if not _whole(trainer.seed) or not -(2**63) <= trainer.seed < 2**63:
        raise InvalidSetup(f"seed has to be a whole number of 64 bits, not {trainer.seed!r}")


def _check_data(trainer: Trainer) -> None:
    sets: dict[str, Any] = {"train": trainer.train}
    if isinstance(trainer.evaluate, Mapping):
        sets.update({f"evaluate[{name!r}]": each for name, each in trainer.evaluate.items()})
    elif trainer.evaluate is not None:
        sets["evaluate"] = trainer.evaluate
    for name, data in sets.items():
        iterable = hasattr(data, "__iter__") or hasattr(data, "__getitem__")
        if not iterable or isinstance(data, (str, bytes, type)):
            raise InvalidSetup(f"{name} is a {_kind(data)}: give a trainkit.data.Loader, or any iterable of batches")
        samples = data.dataset if isinstance(data, Loader) else data
        if name != "train" and length_of(samples) == 0:
            raise InvalidSetup(f"{name} is empty: give it at least one sample, or leave it out")


def _check_durations(trainer: Trainer) -> None:
    for name in _CADENCES:
        if (every := getattr(trainer, name)) is not None:
            _told(name, duration, every)
    length = _told("max_duration", duration, trainer.max_duration)
    if trainer.schedule_total is not None:
        _told("schedule_total", duration, trainer.schedule_total)
        if trainer.schedule is None:
            raise InvalidSetup("schedule_total without a schedule: give schedule=..., or leave it out")
    if length.unit == "ev" and (trainer.evaluate is None or trainer.evaluate_every is None):
        raise InvalidSetup(
            f"max_duration={str(length)!r} would never be reached, because nothing is evaluated: give "
            "evaluate and evaluate_every, or another unit"
        )


def _check_on_change(trainer: Trainer) -> None:
    given = trainer.on_change
    if not isinstance(given, Mapping):
        raise InvalidSetup(f"on_change is a {_kind(given)}: give a mapping, for instance {{'seed': 'accept'}}")
    for name, word in given.items():
        if name not in CHECKPOINT_DECIDES:
            near = nearest(str(name), CHECKPOINT_DECIDES)
            raise InvalidSetup(
                f"on_change[{name!r}]: a checkpoint decides {', '.join(CHECKPOINT_DECIDES)}, and any other setting may "
                "change without it" + (f"; did you mean {near}?" if near else "")
            )
        allowed = ("accept", "scale") if name == "batch_size" else ("accept",)
        if word not in allowed:
            raise InvalidSetup(f"on_change[{name!r}]={word!r}: choose {' or '.join(allowed)}, or leave it out")


def _check_members(trainer: Trainer) -> None:
    _each("callbacks", trainer.callbacks, Callback, "a trainkit.Callback")
    _each("trackers", trainer.trackers, Tracker, "a trainkit.Tracker")
    if not isinstance(trainer.metrics, Mapping):
        raise InvalidSetup(
            f"metrics is a {_kind(trainer.metrics)}: give them by the names that evaluation_step uses, as in "
            "{'accuracy': MulticlassAccuracy(10)}"
        )
    for name, metric in trainer.metrics.items():
        if isinstance(metric, type) or not isinstance(metric, Metric):
            raise InvalidSetup(
                f"metrics[{name!r}] is a {_kind(metric)}: give a torchmetrics.Metric, or what has update, compute, "
                "reset and to"
            )
    if trainer.checkpoints is not None and not isinstance(trainer.checkpoints, Checkpoints):
        raise InvalidSetup(
            f"checkpoints is a {_kind(trainer.checkpoints)}: give trainkit.Checkpoints(folder=..., every=...), or None"
        )
    names = [callback.name for callback in trainer.callbacks]
    if double := next((name for name in names if names.count(name) > 1), None):
        raise InvalidSetup(f"two callbacks are called {double!r}: their states need different names, override `name`")


def _check_metrics(trainer: Trainer) -> None:
    if trainer.schedule_monitor is not None:
        known = named_sets(trainer.evaluate)
        _told("schedule_monitor", lambda name: refuse_unknown(name, known, trainer.metrics), trainer.schedule_monitor)
    if "loss" in trainer.metrics:
        raise InvalidSetup("a metric is called 'loss', as the mean loss of an evaluation is: give it another name")
    if trainer.checkpoints is not None and trainer.checkpoints.best is not None:
        metric = trainer.checkpoints.best.metric
        _told(
            "Checkpoints(best=...)", lambda _: refuse_unknown(metric, named_sets(trainer.evaluate), trainer.metrics), 0
        )


def _each(setting: str, given: Any, kind: type, wanted: str) -> None:
    if not isinstance(given, (list, tuple)):
        raise InvalidSetup(f"{setting} is a {_kind(given)}: give a list")
    for at, each in enumerate(given):
        if not isinstance(each, kind):
            raise InvalidSetup(f"{setting}[{at}] is a {_kind(each)}: give {wanted}")


def _told(setting: str, read: Callable[[Any], Any], value: Any) -> Any:
    try:
        return read(value)
    except InvalidSetup as error:
        raise InvalidSetup(f"{setting}: {error}") from None


def _kind(value: Any) -> str:
    return f"class ({value.__name__}), not an instance" if isinstance(value, type) else type(value).__name__


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
