"""One process with one device."""

from __future__ import annotations

from typing import ClassVar

from trainkit.strategies.base import Strategy


class Single(Strategy):
    """Everything on one device. Costs nothing over the bare module."""

    name: ClassVar[str] = "single"
