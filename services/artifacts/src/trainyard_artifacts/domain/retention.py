"""Which versions of an artifact are kept."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Rule(BaseModel):
    """Which versions of an artifact are kept: those that any part of it keeps; all, when no part is set."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    keep_last: int = Field(0, ge=0)
    """The newest ones."""
    keep_best: int = Field(0, ge=0)
    """The best ones by `best_metric`."""
    best_metric: str = ""
    best_mode: Literal["", "min", "max"] = ""
    ttl_s: float = Field(0.0, ge=0)
    """What is younger than this."""

    @property
    def keeps_all(self) -> bool:
        """Whether no part of it is set."""
        return not (self.keep_last or self.keep_best or self.ttl_s)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A version, as retention sees it."""

    id: str
    order: int
    """Its place among the artifact's versions: the higher, the newer."""
    created_ns: int
    metrics: Mapping[str, float]
    pinned: bool
    """An alias other than "latest" points to it, or a job would resume from it."""


def superfluous(rule: Rule, versions: Sequence[Candidate], now_ns: int) -> list[str]:
    """Ids of versions that nothing keeps: neither a part of the rule nor a pin. None, when the rule keeps all.

    A version without a finite value of the metric is never among the best; of equals the newer is better.
    """
    if rule.keeps_all:
        return []
    newest_first = sorted(versions, key=lambda version: version.order, reverse=True)
    kept = {version.id for version in newest_first[: rule.keep_last]}
    kept |= {version.id for version in versions if version.pinned}
    kept |= {version.id for version in versions if now_ns - version.created_ns < rule.ttl_s * 1e9}
    kept |= _best(rule, newest_first)
    return [version.id for version in versions if version.id not in kept]


def score(value: float, mode: str) -> float:
    """Grows with how good a value of a metric is, of which the mode says whether "min" or "max" is best."""
    return value if mode == "max" else -value


def _best(rule: Rule, newest_first: Sequence[Candidate]) -> set[str]:
    scored = sorted(
        (
            (score(version.metrics[rule.best_metric], rule.best_mode), version.order, version.id)
            for version in newest_first
            if math.isfinite(version.metrics.get(rule.best_metric, math.nan))
        ),
        reverse=True,
    )
    return {id for _, _, id in scored[: rule.keep_best]}
