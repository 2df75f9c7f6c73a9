"""Trainyard for a user's machine: the client, the tracker, the spec, the command `yard`.

Names load when they are first used: a training script that only imports `trainyard.tracker` pays for nothing else.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainyard import errors, tracker
    from trainyard.client import AsyncClient, Client

__all__ = ["AsyncClient", "Client", "errors", "tracker"]


def __getattr__(name: str) -> Any:
    if name in ("Client", "AsyncClient"):
        return getattr(import_module("trainyard.client"), name)
    if name in __all__:
        return import_module(f"trainyard.{name}")
    raise AttributeError(f"module 'trainyard' has no attribute '{name}'; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)
