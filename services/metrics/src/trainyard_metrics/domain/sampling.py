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
        return np.unique(np.concatenate([_first(value, starts, np.minimum), _first(value, starts, np.maximum)]))
    low = _first(np.where(missing, np.inf, value), starts, np.minimum)
    high = _first(np.where(missing, -np.inf, value), starts, np.maximum)
    first = _first(np.where(missing, 0.0, 1.0), starts, np.minimum)
    numbers = np.concatenate([low, high])
    # A bucket of NaNs has no minimum, and one of numbers has no NaN.
    return np.unique(np.concatenate([numbers[~missing[numbers]], first[missing[first]]]))


def _starts(size: int, buckets: int) -> Ints:
    edges = np.arange(buckets, dtype=np.int64) * size
    return edges // buckets


def _first(value: Floats, starts: Ints, extreme: np.ufunc) -> Ints:
    """The index of the first minimum, or maximum, of each bucket."""
    sizes = np.diff(starts, append=len(value))
    found = np.flatnonzero(value == np.repeat(extreme.reduceat(value, starts), sizes))
    bucket = np.searchsorted(starts, found, side="right")
    firsts: Ints = found[np.flatnonzero(np.diff(bucket, prepend=0))]
    return firsts
