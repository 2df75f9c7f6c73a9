"""Fewer points that look the same: every bucket keeps its minimum, its maximum, and a value that is not a number."""

from __future__ import annotations

import numpy as np

from trainyard_metrics.domain.columns import Floats, Ints


def downsample(value: Floats, max_points: int) -> Ints:
    """Indexes of at most `max_points` (3 or more) points to keep, ascending.

    Points are cut into buckets whose sizes differ by one at most. A bucket keeps its minimum and its maximum
    (infinities count as such) and, when it has one, its first NaN.
    """
    if len(value) <= max_points:
        return np.arange(len(value))
    missing = np.isnan(value)
    has_missing = bool(missing.any())
    starts = _starts(len(value), max_points // (3 if has_missing else 2))
    if not has_missing:
        return np.unique(np.concatenate([_first_lowest(value, starts), _first_lowest(-value, starts)]))
    low = _first_lowest(np.where(missing, np.inf, value), starts)
    high = _first_lowest(np.where(missing, np.inf, -value), starts)
    first = _first_lowest(np.where(missing, 0.0, 1.0), starts)
    numbers = np.concatenate([low, high])
    # A bucket of NaNs has no minimum, and one of numbers has no NaN.
    return np.unique(np.concatenate([numbers[~missing[numbers]], first[missing[first]]]))


def _starts(size: int, buckets: int) -> Ints:
    edges = np.arange(buckets, dtype=np.int64) * size
    return edges // buckets


def _first_lowest(value: Floats, starts: Ints) -> Ints:
    """The index of the first minimum of each bucket."""
    lowest = np.minimum.reduceat(value, starts)
    sizes = np.diff(starts, append=len(value))
    found = np.flatnonzero(value == np.repeat(lowest, sizes))
    bucket = np.repeat(np.arange(len(starts)), sizes)[found]
    firsts: Ints = found[np.flatnonzero(np.diff(bucket, prepend=-1))]
    return firsts
