"""A progress bar that one process shows."""

from __future__ import annotations

from typing import Any

from tqdm.auto import tqdm as _tqdm

from trainkit.dialects.accmt.utility import MASTER_PROCESS


class tqdm(_tqdm):  # type: ignore[type-arg]
    """The bar of the package tqdm, shown by the first process alone.

    `bar_format` may contain `{rate_s}`: the seconds of one iteration with milliseconds, or `?` before the first.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "disable": kwargs.get("disable") or not MASTER_PROCESS})

    @property
    def format_dict(self) -> dict[str, Any]:
        known = dict(super().format_dict)
        rate = known.get("rate")
        return {**known, "rate_s": f"{1 / rate:.3f} s" if rate else "? s"}
