"""Talking to a yard from Python: `Client` for ordinary code, `AsyncClient` for asyncio.

    from trainyard import Client

    with Client() as yard:
        job = yard.submit("job.yaml")
        job.wait()
        print(job.values()["accuracy"])

Answers are the messages of `trainyard_protos` themselves, whose documentation is in `proto/trainyard/v1`; errors are
those of `trainyard.errors`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainyard.client.aio import AsyncClient
    from trainyard.client.handles import AsyncJobHandle
    from trainyard.client.sync import Client, JobHandle

__all__ = ["AsyncClient", "AsyncJobHandle", "Client", "JobHandle"]

_MODULES = {"AsyncClient": "aio", "AsyncJobHandle": "handles", "JobHandle": "sync", "Client": "sync"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"trainyard.client.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'trainyard.client' has no attribute '{name}'; it has {', '.join(__all__)}")
