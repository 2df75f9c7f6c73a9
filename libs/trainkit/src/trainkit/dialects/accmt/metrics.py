"""Metrics that compute once over all rows of a dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from trainkit.errors import InvalidSetup, InvalidStep
from trainkit.metrics.own import PerProcess, WholeSet

if TYPE_CHECKING:
    from trainkit.dialects.accmt.states import TrainingState


class Metric:
    """Override `compute`; it runs on the first process, over the rows of all.

    Args:
        name: the key under which `validation_step` returns the tensors.
        greater_is_better: the direction of "best".
        main_metric: which entry of `compute`'s result decides what is best; default `name`.
        do_checks: compare shapes as batches come in.
        cast: floating tensors are kept in this type; None: as they are.
    """

    def __init__(
        self,
        name: str,
        greater_is_better: bool = True,
        main_metric: str | None = None,
        do_checks: bool = True,
        cast: torch.dtype | str | None = torch.float32,
    ) -> None:
        if not name or set(name) & set("@/"):
            raise InvalidSetup(f"a metric's name has no '@' and no '/', because rules are written with them: {name!r}")
        self.name, self.greater_is_better, self.main_metric = name, greater_is_better, main_metric or name
        self.do_checks, self.cast = do_checks, cast
        self.adapted()  # says at once when `cast` is wrong

    def compute(self, *args: Any) -> Mapping[str, float]:
        """The values by name, from what `validation_step` returned, each over all rows."""
        raise NotImplementedError(f"{type(self).__name__} has no compute(*args)")

    def adapted(self) -> WholeSet | PerProcess:
        """The same as a metric of trainkit's."""
        return _Whole(self)

    def checked(self, *args: Any) -> dict[str, float]:
        """What `compute` returned, when it can be used."""
        values = self.compute(*args)
        if self.main_metric not in values:
            raise KeyError(f"{self.name}.compute returned no {self.main_metric!r}; it has {', '.join(values)}")
        try:
            return {key: float(value) for key, value in values.items()}
        except (TypeError, ValueError):
            raise TypeError(f"{self.name}.compute has to return numbers by name, not {values!r}") from None


class MetricParallel(Metric):
    """Every process computes on its own rows; the mean over processes counts rows."""

    def __init__(
        self,
        name: str,
        greater_is_better: bool = True,
        main_metric: str | None = None,
        do_checks: bool = True,
        cast: torch.dtype | str | None = torch.float32,
    ) -> None:
        super().__init__(name, greater_is_better, main_metric, do_checks, cast)

    def adapted(self) -> WholeSet | PerProcess:
        return _Parts(self)


class _Whole(WholeSet):
    def __init__(self, metric: Metric) -> None:
        super().__init__(cast=metric.cast, check=metric.do_checks)
        self._metric = metric

    def score(self, *values: Any) -> dict[str, float]:
        return self._metric.checked(*values)


class _Parts(PerProcess):
    def __init__(self, metric: Metric) -> None:
        super().__init__(cast=metric.cast, check=metric.do_checks)
        self._metric = metric

    def score(self, *values: Any) -> dict[str, float]:
        return self._metric.checked(*values)


class Routed:
    """The metrics of one name: each dataset's own, chosen by the dataset that is being evaluated."""

    def __init__(self, name: str, by_set: Mapping[str, Metric], state: TrainingState) -> None:
        self.name, self._state = name, state
        self._metrics = {key: metric.adapted() for key, metric in by_set.items()}

    def update(self, *values: Any) -> None:
        """Adds a batch, if the dataset has this metric and the step returned values for it."""
        key = self._state.val_key
        if key in self._metrics and not skipped(values):
            try:
                self._metrics[key].update(*values)
            except InvalidStep as error:
                raise ValueError(f"metric {self.name!r} on dataset {key!r}: {error}") from error

    def compute(self) -> float | Mapping[str, float]:
        """Its values on the present dataset; none if the dataset does not have it."""
        key = self._state.val_key
        return self._metrics[key].compute() if key in self._metrics else {}

    def reset(self) -> None:
        for metric in self._metrics.values():
            metric.reset()

    def to(self, device: torch.device) -> Any:
        for metric in self._metrics.values():
            metric.to(device)
        return self


def skipped(values: Sequence[Any]) -> bool:
    """Whether a step returned only None for a metric: the metric leaves this batch out."""
    return bool(values) and all(value is None for value in values)


def by_set(
    metrics: Metric | Sequence[Metric] | Mapping[str, Metric | Sequence[Metric]] | None, sets: Sequence[str]
) -> dict[str, dict[str, Metric]]:
    """Each dataset's metrics by name.

    Raises:
        InvalidSetup: metrics for a dataset that there is not, or two of one name.
    """
    if not isinstance(metrics, Mapping):
        metrics = {key: metrics or [] for key in sets}
    for key in metrics:
        if key not in sets:
            raise InvalidSetup(
                f"metrics are given for {key!r}; the validation datasets are {', '.join(sets) or 'none'}"
            )
    return {key: _named(key, metrics.get(key, [])) for key in sets}


def _named(key: str, given: Metric | Sequence[Metric]) -> dict[str, Metric]:
    metrics = [given] if isinstance(given, Metric) else list(given)
    names = [metric.name for metric in metrics]
    if len(set(names)) < len(names):
        raise InvalidSetup(f"two metrics of dataset {key!r} have the same name: {', '.join(names)}")
    return dict(zip(names, metrics, strict=True))


def names(given: Metric | Sequence[Metric] | Mapping[str, Metric | Sequence[Metric]] | None) -> list[str]:
    """The names of all metrics, each once."""
    return list(dict.fromkeys(metric.name for metric in listed(given)))


def listed(given: Metric | Sequence[Metric] | Mapping[str, Metric | Sequence[Metric]] | None) -> list[Metric]:
    """All metrics, of each dataset in turn."""
    groups: Any = given.values() if isinstance(given, Mapping) else [given or []]
    return [metric for group in groups for metric in (group if isinstance(group, list | tuple) else [group])]
