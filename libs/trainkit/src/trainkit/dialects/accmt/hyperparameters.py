"""How long, how much at once, and with which optimizer and schedule: in code, a mapping or a YAML file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from trainkit.catalogue import nearest
from trainkit.config.problems import ConfigError, Problem
from trainkit.config.reading import Tree, read_yaml
from trainkit.errors import InvalidSetup
from trainkit.optim import optimizer, schedule
from trainkit.trainer import OptimizerFactory, ScheduleFactory


class Optimizer(StrEnum):
    """Optimizers by name."""

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


class Scheduler(StrEnum):
    """Schedules by name."""

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


@dataclass
class HyperParameters:
    """The numbers of a run.

    Args:
        epochs: passes over the training data.
        max_steps: ends the run after this many batches instead.
        batch_size: samples per process and step; a pair gives training and evaluation.
        optimizer: a name or a member of `Optimizer`.
        optim_kwargs: its arguments.
        scheduler: a name or a member of `Scheduler`.
        scheduler_kwargs: its arguments; what follows from the run's length is filled in.
        step_scheduler_per_epoch: step the schedule at the end of each epoch instead of after each update.

    Raises:
        InvalidSetup: a number is out of range, or a name or argument is unknown; says what is allowed.
    """

    epochs: int | None = 1
    max_steps: int | None = None
    batch_size: int | Sequence[int] = 1
    optimizer: str = "SGD"
    optim_kwargs: dict[str, Any] | None = None
    scheduler: str | None = None
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
        return optimizer(str(self.optimizer), **(self.optim_kwargs or {}))

    def make_schedule(self) -> ScheduleFactory | None:
        """What makes the schedule."""
        if self.scheduler is None:
            return None
        per: Any = "epoch" if self.step_scheduler_per_epoch else "update"
        return schedule(str(self.scheduler), per=per, **(self.scheduler_kwargs or {}))

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
        _unfold(values, "optim", "optimizer", "optim_kwargs")
        _unfold(values, "scheduler", "scheduler", "scheduler_kwargs")
        return cls(**values)


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
