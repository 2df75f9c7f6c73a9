"""Which checkpoints of a job are kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trainyard_protos.v1 import artifacts_pb2 as pb


@dataclass(frozen=True, slots=True)
class Candidate:
    """A checkpoint of one job, as retention sees it."""

    id: str
    number: int
    metrics: dict[str, float]
    pinned: bool  # has an alias beside "latest"


def superfluous(rule: pb.CheckpointInfo, checkpoints: Sequence[Candidate]) -> list[str]:
    """Ids to delete: all but the newest `keep_last`, the best by `best_metric`, and the pinned ones.

    A checkpoint without a finite value of the metric is never the best; of equals the newest is.
    """
    if rule.keep_last <= 0:
        return []
    newest_first = sorted(checkpoints, key=lambda checkpoint: checkpoint.number, reverse=True)
    kept = {checkpoint.id for checkpoint in newest_first[: rule.keep_last]}
    kept |= {checkpoint.id for checkpoint in checkpoints if checkpoint.pinned}
    kept |= _best(rule, newest_first)
    return [checkpoint.id for checkpoint in checkpoints if checkpoint.id not in kept]


def _best(rule: pb.CheckpointInfo, newest_first: Sequence[Candidate]) -> set[str]:
    sign = 1.0 if rule.best_mode == "max" else -1.0
    scored = [
        (sign * checkpoint.metrics[rule.best_metric], checkpoint.number, checkpoint.id)
        for checkpoint in newest_first
        if math.isfinite(checkpoint.metrics.get(rule.best_metric, math.nan))
    ]
    return {max(scored)[2]} if rule.best_metric and scored else set()
