"""What is refused when a `Trainer` is constructed."""

from __future__ import annotations

import inspect
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trainkit.catalogue import nearest
from trainkit.dialects.accmt.dataloader_samplers import BaseSampler
from trainkit.durations import Duration, Epochs, Evaluations, Steps, duration
from trainkit.errors import InvalidSetup

if TYPE_CHECKING:
    from trainkit.dialects.accmt.hyperparameters import HyperParameters

TRACKERS = ("mlflow",)
_FLAGS = (
    "enable_checkpointing",
    "multiple_checkpoints",
    "disable_model_saving",
    "gradient_checkpointing",
    "set_to_none",
    "shuffle_train",
    "safe_serialization",
    "compile",
    "safe_mode",
    "dataloader_pin_memory",
    "dataloader_drop_last",
    "eval_when_finish",
    "eval_when_start",
    "batch_device_placement",
    "prepare_batch",
    "safe_steps",
    "destroy_after_training",
    "enable_prepare_logging",
)
_RUN_ARGUMENTS = ("run_name", "tags")
_SIZE = re.compile(r"(\d+)\s*([KMGT]?)B", re.IGNORECASE)
_FACTORS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def tracker_arguments(given: Mapping[str, Any], trainer: type) -> None:
    """Refuses keywords that nobody takes."""
    known = [*list(inspect.signature(trainer).parameters)[:-1], *_RUN_ARGUMENTS, "on_change"]
    for name in given:
        if name not in _RUN_ARGUMENTS:
            near = nearest(name, known)
            raise TypeError(f"Trainer has no parameter {name!r}" + (f"; did you mean {near}?" if near else ""))


def one_of(name: str, value: Any, alias: str, other: Any) -> Any:
    """The value of a parameter that was given under one of its two names.

    Raises:
        InvalidSetup: it was given under both.
    """
    if value is not None and other is not None:
        raise InvalidSetup(f"{name} and {alias} are two names of one parameter: give one")
    return other if value is None else value


def settings(given: Any) -> None:
    """Refuses values out of their range, and those that do not go together."""
    for name in ("evaluate_every_n_steps", "cleanup_cache_every_n_steps", "grad_accumulation_steps", "max_checkpoints"):
        value = getattr(given, name)
        if value is not None and (not isinstance(value, int) or value < 1):
            raise InvalidSetup(f"{name} has to be at least 1, or None, not {value!r}")
    for name in _FLAGS:
        if not isinstance(value := getattr(given, name), bool):
            raise InvalidSetup(f"{name} has to be True or False, not {value!r}")
    if given.log_every is not None and not _whole(given.log_every):
        raise InvalidSetup(f"log_every is -1, None or 1 and more, not {given.log_every!r}")
    for value in given.patience.values() if isinstance(given.patience, Mapping) else [given.patience]:
        if value is not None and not _whole(value):
            raise InvalidSetup(f"patience is a whole number of evaluations, or one for each rule, not {value!r}")
    _places_and_names(given)
    _samplers(given.sampler)
    for condition, problem in _CONFLICTS:
        if condition(given):
            raise InvalidSetup(problem)
    if given.log_with is not None and given.log_with not in TRACKERS:
        raise InvalidSetup(f"log_with={given.log_with!r}: there is {', '.join(TRACKERS)}")
    checkpoint_every(given.checkpoint_every)
    shard_bytes(given.max_shard_size)
    if given.compile_kwargs is not None and not given.compile:
        warnings.warn("compile_kwargs has no effect without compile=True", stacklevel=3)


def _places_and_names(given: Any) -> None:
    for name in ("model_path", "logging_dir"):
        if not isinstance(value := getattr(given, name), str | os.PathLike):
            raise InvalidSetup(f"{name} has to be a folder, as text or as a Path, not {value!r}")
    for name in ("train_loss_metric_name", "val_loss_metric_name"):
        if not isinstance(value := getattr(given, name), str) or not value:
            raise InvalidSetup(f"{name} has to be a name, not {value!r}")
    if given.track_name is not None and not isinstance(given.track_name, str):
        raise InvalidSetup(
            f"track_name has to be a name, or None for the last part of model_path, not {given.track_name!r}"
        )


def _samplers(given: Any) -> None:
    for each in given if isinstance(given, list | tuple) else [given]:
        if given is not None and (isinstance(each, str) or not isinstance(each, Iterable | BaseSampler)):
            raise InvalidSetup(f"sampler has to be a sampler of indices, or a list of samplers, not {given!r}")


def instances(name: str, given: Sequence[Any], kind: type) -> None:
    """Refuses what is no instance of a class.

    Raises:
        InvalidSetup: says what was given.
    """
    for each in given:
        if not isinstance(each, kind):
            raise InvalidSetup(f"{name} has {each!r}: give an instance of a class that derives from {kind.__name__}")


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def optimizer(given: Any, hps: HyperParameters) -> None:
    """Warns about settings that do not suit the optimizer."""
    if given.clip_grad is not None and str(hps.optimizer) == "Adafactor":
        warnings.warn(
            "Adafactor limits its updates by itself, and clipped gradients make it slower: give clip_grad=None",
            stacklevel=3,
        )


def tracker_config(given: Any, parameters: Mapping[str, Any]) -> None:
    """Refuses an additional parameter with the name of one of the run's own."""
    for name in given.additional_tracker_config or {}:
        if name in parameters:
            raise InvalidSetup(f"additional_tracker_config: {name!r} is one of the run's own parameters")


_CONFLICTS: list[tuple[Callable[[Any], bool], str]] = [
    (
        lambda s: s.collate_fn is not None and (s.collate_fn_train is not None or s.collate_fn_val is not None),
        "collate_fn serves both loaders: give it alone, or collate_fn_train and collate_fn_val",
    ),
    (
        lambda s: s.train_loss_metric_name == s.val_loss_metric_name,
        "train_loss_metric_name and val_loss_metric_name are equal: the two series would be mixed",
    ),
    (
        lambda s: s.log_every is not None and (s.log_every == 0 or s.log_every < -1),
        "log_every is -1, None or 1 and more",
    ),
    (
        lambda s: s.max_checkpoints is not None and not s.multiple_checkpoints,
        "max_checkpoints needs multiple_checkpoints",
    ),
    (
        lambda s: s.resume is not None and not isinstance(s.resume, bool) and not s.multiple_checkpoints,
        "resume by index needs multiple_checkpoints=True",
    ),
]


def checkpoint_every(text: str | None) -> Duration | None:
    """`epoch`, `2eps`, `"5 steps"`, `3st`, `"4 evals"` as a duration.

    Raises:
        InvalidSetup: quotes what cannot be read.
    """
    if text is None:
        return None
    try:
        found = duration(text)
    except InvalidSetup as error:
        raise InvalidSetup(f"checkpoint_every={text!r}: {error}") from None
    if not isinstance(found, Epochs | Steps | Evaluations):
        raise InvalidSetup(f"checkpoint_every={text!r}: the unit is epoch, step or evaluation")
    return found


def shard_bytes(text: str) -> int:
    """`"10GB"` in bytes.

    Raises:
        InvalidSetup: it is no size.
    """
    match = _SIZE.fullmatch(str(text))
    if match is None or not int(match[1]):
        raise InvalidSetup(f"max_shard_size={text!r}: write a number and a unit, as in '10GB' or '500MB'")
    return int(match[1]) * _FACTORS[match[2].upper()]


def bounds(label: str, below: float | None, above: float | None) -> None:
    """Refuses bounds that no value meets, or with several groups."""
    if (below is not None or above is not None) and "/" in label:
        raise InvalidSetup(f"{label!r} has several groups: bounds go with one")
    if below is not None and above is not None and below <= above:
        raise InvalidSetup(f"no value is above {above} and below {below}")
