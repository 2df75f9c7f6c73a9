"""How long, how much at once, and with which optimizer and schedule: in code, a mapping or a YAML file."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

from trainkit import catalogue
from trainkit.catalogue import nearest
from trainkit.config.problems import ConfigError, Problem
from trainkit.config.reading import Tree, read_yaml
from trainkit.errors import InvalidSetup
from trainkit.optim import optimizer, schedule
from trainkit.trainer import OptimizerFactory, ScheduleFactory, Totals


class Optimizer(StrEnum):
    """Optimizers by name. A call makes one: `Optimizer.AdamW(model.parameters(), lr=1e-3)`."""

    ASGD = "ASGD"
    Adadelta = "Adadelta"
    Adafactor = "Adafactor"
    Adagrad = "Adagrad"
    Adam = "Adam"
    AdamW = "AdamW"
    Adamax = "Adamax"
    NAdam = "NAdam"
    RAdam = "RAdam"
    RMSprop = "RMSprop"
    Rprop = "Rprop"
    SGD = "SGD"
    SparseAdam = "SparseAdam"

    def __call__(self, params: Any, **kwargs: Any) -> Any:
        return catalogue.build("optimizer", self.value, params, **kwargs)


class Scheduler(StrEnum):
    """Schedules by name. A call makes one: `Scheduler.StepLR(optimizer, step_size=10)`."""

    Constant = "Constant"
    ConstantWithWarmup = "ConstantWithWarmup"
    CosineAnnealingLR = "CosineAnnealingLR"
    CosineAnnealingWarmRestarts = "CosineAnnealingWarmRestarts"
    CosineWithHardRestartsWithWarmup = "CosineWithHardRestartsWithWarmup"
    CosineWithWarmup = "CosineWithWarmup"
    CyclicLR = "CyclicLR"
    ExponentialLR = "ExponentialLR"
    InverseSQRT = "InverseSQRT"
    LinearLR = "LinearLR"
    LinearWithWarmup = "LinearWithWarmup"
    OneCycleLR = "OneCycleLR"
    PolynomialDecayWithWarmup = "PolynomialDecayWithWarmup"
    StepLR = "StepLR"

    def __call__(self, optimizer: Any, **kwargs: Any) -> Any:
        return catalogue.build("schedule", self.value, optimizer, **kwargs)


@dataclass
class HyperParameters:
    """The numbers of a run.

    Args:
        epochs: passes over the training data.
        max_steps: ends the run after this many batches instead.
        batch_size: samples per process and step; a pair gives training and evaluation.
        optimizer: a name, a member of `Optimizer`, or a class or function that takes parameters.
        optim_kwargs: its arguments.
        scheduler: a name, a member of `Scheduler`, or a class or function that takes the optimizer.
        scheduler_kwargs: its arguments; what follows from the run's length is filled in. `warmup_ratio` gives
            `num_warmup_steps` as a share of the run.
        step_scheduler_per_epoch: step the schedule at the end of each epoch instead of after each update.

    Raises:
        InvalidSetup: a number is out of range, or a name or argument is unknown; says what is allowed.
    """

    epochs: int | None = 1
    max_steps: int | None = None
    batch_size: int | Sequence[int] = 1
    optimizer: str | Callable[..., Any] = "SGD"
    optim_kwargs: dict[str, Any] | None = None
    scheduler: str | Callable[..., Any] | None = None
    scheduler_kwargs: dict[str, Any] | None = None
    step_scheduler_per_epoch: bool = False

    def __post_init__(self) -> None:
        if self.epochs is None and self.max_steps is None:
            raise InvalidSetup("give epochs or max_steps: both are None, so the run would not end")
        for name in ("epochs", "max_steps"):
            if getattr(self, name) is not None:
                _at_least_one(name, getattr(self, name))
        if isinstance(self.batch_size, list):
            self.batch_size = tuple(self.batch_size)
        for size in self.batch_sizes:
            _at_least_one("batch_size", size)
        for name, given in (("optimizer", self.optimizer), ("scheduler", self.scheduler)):
            if not isinstance(given, str) and not callable(given) and (name, given) != ("scheduler", None):
                raise InvalidSetup(f"{name}={given!r}: give a name, or a class or function that makes one")
        if not isinstance(self.step_scheduler_per_epoch, bool):
            raise InvalidSetup(
                f"step_scheduler_per_epoch has to be True or False, not {self.step_scheduler_per_epoch!r}"
            )
        self.make_optimizer()
        self.make_schedule()

    @property
    def batch_sizes(self) -> tuple[int, int]:
        """Samples per process and step, in training and evaluation."""
        if isinstance(self.batch_size, int):
            return self.batch_size, self.batch_size
        if len(self.batch_size) != 2:
            raise InvalidSetup(f"batch_size is one number or a pair (training, evaluation), not {self.batch_size!r}")
        return self.batch_size[0], self.batch_size[1]

    @property
    def max_duration(self) -> str:
        """Where training ends, as trainkit writes it."""
        return f"{self.max_steps}st" if self.max_steps is not None else f"{self.epochs}ep"

    def make_optimizer(self) -> OptimizerFactory:
        """What makes the optimizer."""
        if not isinstance(self.optimizer, str):
            return partial(_own_optimizer, self.optimizer, self.optim_kwargs or {})
        return optimizer(str(self.optimizer), **(self.optim_kwargs or {}))

    def make_schedule(self) -> ScheduleFactory | None:
        """What makes the schedule."""
        if self.scheduler is None:
            return None
        per: Any = "epoch" if self.step_scheduler_per_epoch else "update"
        if not isinstance(self.scheduler, str):
            return partial(_own_schedule, self.scheduler, self.scheduler_kwargs or {}, per)
        return schedule(str(self.scheduler), per=per, **(self.scheduler_kwargs or {}))

    @classmethod
    def from_config(cls, config: str | Path | Mapping[str, Any]) -> HyperParameters:
        """Hyperparameters from a YAML file or a mapping; see `of`."""
        return cls.of(config)

    def to_dict(self) -> dict[str, Any]:
        """The mapping that `from_config` reads, with optimizer and schedule by name."""
        found: dict[str, Any] = {
            "epochs": self.epochs,
            "max_steps": self.max_steps,
            "batch_size": self.batch_size,
            "optimizer": {"type": name_of(self.optimizer), **(self.optim_kwargs or {})},
        }
        if self.scheduler is not None:
            found["scheduler"] = {"type": name_of(self.scheduler), **(self.scheduler_kwargs or {})}
        return {"hps": {**found, "step_scheduler_per_epoch": self.step_scheduler_per_epoch}}

    def get_config(self) -> dict[str, Any]:
        """All values in one mapping: the names of optimizer and schedule, and their arguments beside them."""
        found: dict[str, Any] = {}
        for key, value in self.to_dict()["hps"].items():
            if isinstance(value, dict):
                value = dict(value)
                found[key] = value.pop("type")
                found |= value
            elif key != "step_scheduler_per_epoch":
                found[key] = value
        return found

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)

    @classmethod
    def of(cls, given: HyperParameters | Mapping[str, Any] | str | Path) -> HyperParameters:
        """Hyperparameters from themselves, a mapping, or a YAML file.

        Raises:
            FileNotFoundError: there is no such file.
            ConfigError: it is empty, or has an unknown key; names file and line.
        """
        if isinstance(given, HyperParameters):
            return given
        if isinstance(given, Mapping):
            return cls._from(Tree(dict(given)))
        return cls._from(read_yaml(Path(given).read_text("utf-8"), str(given)))

    @classmethod
    def _from(cls, tree: Tree) -> HyperParameters:
        if not isinstance(tree.data, Mapping):
            raise ConfigError([Problem(tree.file, message="is no mapping of hyperparameters")])
        if "hps" in tree.data and not isinstance(tree.data["hps"], Mapping):
            raise ConfigError([Problem(tree.file, tree.line_of(("hps",)), "hps", "is no mapping of hyperparameters")])
        inside: tuple[str, ...] = ("hps",) if set(tree.data) == {"hps"} else ()
        values = dict(tree.data["hps"] if inside else tree.data)
        known = [each.name for each in fields(cls)]
        problems = list(tree.problems)
        for name in values:
            if name not in {*known, "optim"}:
                line = tree.line_of((*inside, name))
                problems.append(
                    Problem(tree.file, line, name, "is no hyperparameter", ", ".join(known), nearest(name, known))
                )
        if problems:
            raise ConfigError(problems)
        if "optim" in values and "optimizer" in values:
            raise InvalidSetup("optim and optimizer are two names of one entry: give one")
        _unfold(values, "optim", "optimizer", "optim_kwargs")
        _unfold(values, "optimizer", "optimizer", "optim_kwargs")
        _unfold(values, "scheduler", "scheduler", "scheduler_kwargs")
        return cls(**values)


def name_of(given: str | Callable[..., Any]) -> str:
    """The name of an optimizer or schedule, for people."""
    return str(given) if isinstance(given, str) else getattr(given, "__name__", type(given).__name__)


def _own_optimizer(make: Callable[..., Any], arguments: Mapping[str, Any], named: list[tuple[str, Any]]) -> Any:
    return make([parameter for _, parameter in named], **arguments)


def _own_schedule(make: Callable[..., Any], given: Mapping[str, Any], per: str, optimizer: Any, totals: Totals) -> Any:
    """A schedule of the script's own, with what the run knows for the parameters that it has."""
    steps = totals.updates if per == "update" else totals.epochs
    run = {
        "num_training_steps": steps,
        "total_steps": steps,
        "steps_per_epoch": totals.updates_per_epoch if per == "update" else 1,
        "epochs": totals.epochs,
    }
    known, arguments = inspect.signature(make).parameters, dict(given)
    if "warmup_ratio" in arguments and "warmup_ratio" not in known:
        run["num_warmup_steps"] = round(arguments.pop("warmup_ratio") * steps)
    return make(optimizer, **{**{name: value for name, value in run.items() if name in known}, **arguments})


def _unfold(values: dict[str, Any], key: str, name: str, arguments: str) -> None:
    """`optim: {type: AdamW, lr: 1e-3}` as `optimizer: AdamW` and `optim_kwargs: {lr: 1e-3}`."""
    if isinstance(values.get(key), Mapping):
        rest = dict(values.pop(key))
        if "type" not in rest:
            raise InvalidSetup(f"{key} needs a 'type': the name of the {name}")
        values[name], values[arguments] = rest.pop("type"), rest
    elif key != name and key in values:
        values[name] = values.pop(key)


def _at_least_one(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidSetup(f"{name} has to be a whole number of at least 1, not {value!r}")
