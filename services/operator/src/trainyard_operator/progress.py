"""How far a job is, in the few characters a column of `kubectl get` has."""

from __future__ import annotations

from typing import Any

from trainyard_protos.v1 import common_pb2, metrics_pb2

_UNITS = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))


def of_progress(progress: common_pb2.Progress) -> dict[str, Any]:
    """Fields of the status; nothing while no step was seen."""
    if not progress.updated_ns:
        return {}
    left = progress.seconds_left if progress.HasField("seconds_left") else None
    return {
        "step": progress.step,
        "totalSteps": progress.total_steps or None,
        "progress": steps(progress.step, progress.total_steps),
        "timeLeft": None if left is None else duration(left),
    }


def steps(step: int, total: int) -> str:
    """For instance "1200/2000 (60%)", or "1200" when nobody knows how many there will be."""
    return f"{step}/{total} ({min(100, 100 * step // total)}%)" if total else str(step)


def duration(seconds: float) -> str:
    """The two largest units: "2h5m", "40s"."""
    left = max(0, round(seconds))
    parts: list[tuple[int, str]] = []
    for unit, size in _UNITS:
        if left >= size or (parts and left):
            parts.append((left // size, unit))
            left %= size
    return "".join(f"{count}{unit}" for count, unit in parts[:2] if count) or "0s"


def of_best(series: metrics_pb2.SeriesInfo, mode: str) -> dict[str, Any]:
    """The best value of a series so far."""
    value = series.max_value if mode == "max" else series.min_value
    return {"best": f"{series.name}={value:.4g}"}
