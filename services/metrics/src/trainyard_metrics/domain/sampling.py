"""Fewer points that look the same: every bucket keeps its minimum and its maximum."""

from __future__ import annotations

import numpy as np

from trainyard_metrics.domain.columns import Floats, Ints


def downsample(value: Floats, max_points: int) -> Ints:
    """Indexes of at most `max_points` (2 or more) points to keep, ascending.

    Points are cut into buckets of equal count. Values that are not numbers are kept where a bucket has nothing else.
    """
    if len(value) <= max_points:
        return np.arange(len(value))
    edges = np.linspace(0, len(value), max_points // 2 + 1).astype(np.int64)
    kept: set[int] = set()
    for start, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        bucket = value[start:end]
        if np.isnan(bucket).all():
            kept.add(start)
        else:
            kept |= {start + int(np.nanargmin(bucket)), start + int(np.nanargmax(bucket))}
    return np.array(sorted(kept), np.int64)
