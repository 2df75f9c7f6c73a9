"""What evaluations decide: which weights are kept as the best, and when to stop."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.callbacks.base import Callback
from trainkit.callbacks.weights import save_model
from trainkit.checkpoints.files import check_writable
from trainkit.errors import InvalidSetup
from trainkit.metrics.names import refuse_unknown
from trainkit.metrics.rules import Mode, Record, Rule

if TYPE_CHECKING:
    from trainkit.loop.fit import Fit


class EarlyStopping(Callback):
    """Ends the run after evaluations without a gain.

        EarlyStopping("val/accuracy", mode="max", patience=3)

    Args:
        rule: what is better, or the name of a result.
        mode: the direction, when `rule` is a name.
        patience: how many evaluations in a row may bring no gain.
        min_delta: by how much a value has to be better, when `rule` is a name.
    """

    def __init__(
        self, rule: Rule | str = "val/loss", *, mode: Mode = "min", patience: int = 3, min_delta: float = 0.0
    ) -> None:
        self.record = Record(_rule(rule, mode, min_delta), patience)

    @property
    def name(self) -> str:
        return f"EarlyStopping({self.record.rule})"

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"patience": self.record.patience, "min_delta": self.record.rule.min_delta}

    def state_dict(self) -> Mapping[str, Any]:
        return self.record.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.record.load_state_dict(state)

    def on_fit_start(self, fit: Fit) -> None:
        self.record = _fresh(self.record, fit)

    def on_evaluation_end(self, fit: Fit, results: Mapping[str, float]) -> None:
        self.record.gained(results, fit.state.step)
        if self.record.exhausted:
            fit.stop(f"{self.record.patience} evaluations without a gain: {self.record.rule}")


class KeepBest(Callback):
    """Saves the weights whenever an evaluation is the best so far.

    The folder holds the weights as safetensors (with `save_pretrained`, when the module has it) and `best.json`: the
    value, the step, the results. It is replaced as a whole; read it with `load_weights`.

    Args:
        rule: what is better, with bounds, or the name of a result.
        folder: where; default `best` beside the run's checkpoints.
        mode: the direction, when `rule` is a name.
        max_shard_bytes: the greatest size of one file of weights.
    """

    def __init__(
        self,
        rule: Rule | str = "val/loss",
        folder: str | Path | None = None,
        *,
        mode: Mode = "min",
        max_shard_bytes: int = 5_000_000_000,
    ) -> None:
        self.record = Record(_rule(rule, mode, 0.0))
        self._given = Path(folder) if folder is not None else None
        self.folder = self._given
        self._max_shard_bytes = max_shard_bytes

    @property
    def name(self) -> str:
        return f"KeepBest({self.record.rule})"

    def state_dict(self) -> Mapping[str, Any]:
        return self.record.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.record.load_state_dict(state)

    def on_fit_start(self, fit: Fit) -> None:
        self.record = _fresh(self.record, fit)
        policy = fit.trainer.checkpoints
        if self._given is None and policy is None:
            raise InvalidSetup("KeepBest: the run has no folder, because it makes no checkpoints: give folder=...")
        self.folder = self._given if policy is None else self._given or policy.place() / "best"
        assert self.folder is not None
        _refuse_unwritable(fit, self.folder.parent)

    def on_evaluation_end(self, fit: Fit, results: Mapping[str, float]) -> None:
        if not self.record.gained(results, fit.state.step):
            return
        assert self.folder is not None
        about = {
            "rule": str(self.record.rule),
            "values": self.record.best,
            "step": fit.state.step,
            "epoch": fit.state.epoch,
            "results": dict(results),
        }
        save_model(
            fit, self.folder, max_shard_bytes=self._max_shard_bytes, more={"best.json": json.dumps(about, indent=1)}
        )


def _refuse_unwritable(fit: Fit, folder: Path) -> None:
    """Raises `InvalidSetup` on every process when the first one, which writes, cannot write to a folder."""
    problem = None
    if fit.strategy.is_main:
        try:
            check_writable(folder)
        except OSError as error:
            problem = error.strerror
    if (problem := fit.strategy.gather(problem)[0]) is not None:
        raise InvalidSetup(f"KeepBest: {folder} cannot be written: {problem}; give another folder")


def _fresh(record: Record, fit: Fit) -> Record:
    """The record of a new run.

    Raises:
        InvalidSetup: no evaluation of the run will have the results that the rule names.
    """
    for term in record.rule.terms:
        for name in term.names:
            refuse_unknown(name, fit.evaluated, fit.trainer.metrics)
    return Record(record.rule, record.patience)


def _rule(rule: Rule | str, mode: Mode, min_delta: float) -> Rule:
    return Rule.of(rule, mode=mode, min_delta=min_delta) if isinstance(rule, str) else rule
