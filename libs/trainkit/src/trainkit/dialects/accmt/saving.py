"""Rules for what is best, the models that they keep, and patience."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.callbacks.selection import KeepBest
from trainkit.catalogue import nearest
from trainkit.dialects.accmt.metrics import Metric
from trainkit.dialects.accmt.progress import Progress
from trainkit.dialects.accmt.states import TrainingState
from trainkit.errors import InvalidSetup
from trainkit.metrics.rules import Record, Rule, Term

if TYPE_CHECKING:
    from trainkit.loop.fit import Fit

TRAIN, VALID = "best_train_loss", "best_valid_loss"
_VALID_LOSS = ("valid_loss", "val_loss", "validation_loss")


def canonical(name: str) -> str:
    """A rule's one name: with its prefix, and the validation loss under one name."""
    name = name.removeprefix("best_")
    groups = [group.partition("@") for group in name.split("/")]
    groups = [("valid_loss" if metric in _VALID_LOSS else metric, at, sets) for metric, at, sets in groups]
    return "best_" + "/".join("".join(group) for group in groups)


def rule_of(
    name: str, metrics: Mapping[str, Mapping[str, Metric]], below: float | None = None, above: float | None = None
) -> Rule:
    """What a rule's name means.

    Args:
        name: as of `canonical`.
        metrics: each dataset's metrics by name.
        below, above: the bounds.

    Raises:
        InvalidSetup: it names a metric or dataset that there is not.
    """
    terms = [_term(group, metrics) for group in name.removeprefix("best_").split("/")]
    return Rule(tuple(terms), below=below, above=above)


def _term(group: str, metrics: Mapping[str, Mapping[str, Metric]]) -> Term:
    name, *wanted = group.split("@")
    if name == "train_loss" and not wanted:
        return Term(("train/loss",))
    having = [key for key, named in metrics.items() if name == "valid_loss" or name in named]
    if not having:
        known = sorted({"train_loss", *(("valid_loss",) if metrics else ()), *(n for m in metrics.values() for n in m)})
        near = nearest(name, known)
        raise InvalidSetup(
            f"no metric is called {name!r}; there are {', '.join(known)}" + (f"; did you mean {near}?" if near else "")
        )
    for key in wanted:
        if key not in having:
            raise InvalidSetup(f"no dataset {key!r} has the metric {name!r}; these have it: {', '.join(having)}")
    sets = wanted or having
    if name == "valid_loss":
        return Term(tuple(f"{key}/loss" for key in sets))
    metric = metrics[sets[0]][name]
    names = tuple(f"{key}/{name}/{metrics[key][name].main_metric}" for key in sets)
    return Term(names, "max" if metric.greater_is_better else "min")


class Saving(KeepBest):
    """Keeps the best model by one rule, and ends the run when its patience is over.

    Args:
        label: the rule's name, which is also its folder's (`/` becomes `__`).
        rule: its meaning.
        place: where folders are.
        save: False keeps values alone.
        patience: chances without a gain after which the run ends; None: never.
        max_shard_bytes: the greatest size of one file of weights.
    """

    def __init__(
        self,
        label: str,
        rule: Rule,
        place: Path,
        *,
        save: bool,
        patience: int | None,
        state: TrainingState,
        progress: Progress,
        max_shard_bytes: int,
    ) -> None:
        super().__init__(rule, place / label.replace("/", "__"), max_shard_bytes=max_shard_bytes)
        self.record = Record(rule, patience)
        self.label, self._save, self._state, self._progress = label, save, state, progress
        self._per_epoch = label == TRAIN

    @property
    def name(self) -> str:
        return f"accmt {self.label}"

    def on_fit_start(self, fit: Fit) -> None:
        self._state.patience_left[self.label] = self.record.left

    def on_evaluation_end(self, fit: Fit, results: Mapping[str, float]) -> None:
        if not self._per_epoch:
            self._judge(fit, results)

    def on_epoch_end(self, fit: Fit) -> None:
        if self._per_epoch:
            self._judge(fit, {"train/loss": self._progress.train_loss})

    def on_fit_end(self, fit: Fit) -> None:
        if self._progress.cut:
            self.on_epoch_end(fit)

    def _judge(self, fit: Fit, results: Mapping[str, float]) -> None:
        if self._save:
            super().on_evaluation_end(fit, results)
        else:
            self.record.gained(results, fit.state.step)
        self._state.patience_left[self.label] = self.record.left
        if self.record.best:
            self._state.model_savings[self.label] = self.record.best[0]
        if self.record.exhausted:
            fit.stop(f"{self.label}: {self.record.patience} chances without a gain")


def patience_of(given: int | Mapping[str, int] | None, labels: Sequence[str]) -> dict[str, int | None]:
    """Each rule's patience.

    Raises:
        InvalidSetup: for a rule that there is not.
    """
    if not isinstance(given, Mapping):
        return dict.fromkeys(labels, given)
    named = {canonical(name): count for name, count in given.items()}
    for name in named:
        if name not in labels:
            raise InvalidSetup(f"patience is given for {name!r}; the rules are {', '.join(labels)}")
    return {label: named.get(label) for label in labels}
