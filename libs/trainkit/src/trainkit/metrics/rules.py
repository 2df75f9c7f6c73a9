"""When one state of a model is better than another: which results count, in which direction, within which bounds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trainkit.catalogue import nearest
from trainkit.errors import InvalidSetup

Mode = Literal["min", "max"]


@dataclass(frozen=True, slots=True)
class Term:
    """One or more results that count as one value: their mean.

    Args:
        names: results of an evaluation, such as `val/accuracy`; several only with the same direction.
        mode: whether the least or the greatest value is best.

    Raises:
        InvalidSetup: no name, or a mode that is another word.
    """

    names: tuple[str, ...]
    mode: Mode = "min"

    def __post_init__(self) -> None:
        if not self.names:
            raise InvalidSetup("a rule needs the name of at least one result, such as 'val/loss'")
        if self.mode not in ("min", "max"):
            raise InvalidSetup(f"mode={self.mode!r}: choose min or max")

    def value(self, results: Mapping[str, float]) -> float:
        """The mean of its results.

        Raises:
            InvalidSetup: an evaluation has no such result; says which there are.
        """
        for name in self.names:
            if name not in results:
                near = nearest(name, results)
                known = ", ".join(results) or "none"
                raise InvalidSetup(
                    f"no result is called {name!r}; there are: {known}" + (f"; did you mean {near}?" if near else "")
                )
        return math.fsum(results[name] for name in self.names) / len(self.names)


@dataclass(frozen=True, slots=True)
class Rule:
    """What is better: every term at least as good as at the last gain, and one of them better.

        Rule.of("val/accuracy", mode="max", above=0.8)
        Rule.of("clean/accuracy", "noisy/accuracy", mode="max")             # their mean
        Rule((Term(("clean/accuracy",), "max"), Term(("noisy/f1",), "max")))  # none worse, one better

    Args:
        terms: compared one by one.
        below: only values less than this count; with one term only.
        above: only values greater than this count; with one term only.
        min_delta: by how much a value has to be better than the best so far.

    Raises:
        InvalidSetup: bounds that nothing can meet, or bounds with several terms.
    """

    terms: tuple[Term, ...]
    below: float | None = None
    above: float | None = None
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        if len(self.terms) != 1 and (self.below is not None or self.above is not None):
            raise InvalidSetup("below and above need a rule with exactly one term: make a rule for each")
        if self.below is not None and self.above is not None and self.below <= self.above:
            raise InvalidSetup(f"nothing is above {self.above} and below {self.below}")
        if self.min_delta < 0:
            raise InvalidSetup(f"min_delta has to be 0 or more, not {self.min_delta}")

    @classmethod
    def of(
        cls,
        *names: str,
        mode: Mode = "min",
        below: float | None = None,
        above: float | None = None,
        min_delta: float = 0.0,
    ) -> Rule:
        """A rule with one term."""
        return cls((Term(names, mode),), below, above, min_delta)

    def __str__(self) -> str:
        return " and ".join(f"{term.mode} {'+'.join(term.names)}" for term in self.terms)


class Record:
    """The best values so far by one rule, and how long nothing was gained.

    Args:
        rule: what is better.
        patience: chances without a gain after which `exhausted` is true; None: never.

    Raises:
        InvalidSetup: a patience below 1.
    """

    def __init__(self, rule: Rule, patience: int | None = None) -> None:
        if patience is not None and patience < 1:
            raise InvalidSetup(f"patience has to be at least 1, not {patience}")
        self.rule, self.patience = rule, patience
        self.best: list[float] = []
        self.best_step = -1
        self.left = -1 if patience is None else patience

    @property
    def exhausted(self) -> bool:
        """Whether the patience is over."""
        return self.left == 0

    def gained(self, results: Mapping[str, float], step: int) -> bool:
        """Takes the results of an evaluation. True: they are the best so far."""
        values = [term.value(results) for term in self.rule.terms]
        if self._counts(values) and self._better(values):
            self.best, self.best_step = values, step
            self.left = -1 if self.patience is None else self.patience
            return True
        self.left -= 1 if self.left > 0 else 0
        return False

    def _counts(self, values: list[float]) -> bool:
        below, above = self.rule.below, self.rule.above
        finite = not any(math.isnan(value) for value in values)
        return finite and (below is None or values[0] < below) and (above is None or values[0] > above)

    def _better(self, values: list[float]) -> bool:
        if not self.best:
            return True
        signs = [1.0 if term.mode == "max" else -1.0 for term in self.rule.terms]
        gains = [sign * (new - old) for sign, new, old in zip(signs, values, self.best, strict=True)]
        return min(gains) >= 0 and max(gains) > self.rule.min_delta

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint stores."""
        return {"best": list(self.best), "best_step": self.best_step, "left": self.left, "patience": self.patience}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` returned. With another patience, the chances so far count."""
        self.best, self.best_step = [float(each) for each in state["best"]], state["best_step"]
        before = state.get("patience", self.patience)
        if before == self.patience:
            self.left = state["left"]
        elif self.patience is not None:
            self.left = max(self.patience - (0 if before is None else before - state["left"]), 0)
