"""Talking to a yard from Python: `Client` for ordinary code, `AsyncClient` for asyncio.

    from trainyard import Client

    with Client() as yard:
        job = yard.submit("job.yaml")
        job.wait()
        print(job.values()["accuracy"])

Answers are the messages of `trainyard_protos` themselves, whose documentation is in `proto/trainyard/v1`; errors are
those of `trainyard.errors`. Runs, comparisons and what an operator asks for are frozen dataclasses of this package.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainyard.client.aio import AsyncClient
    from trainyard.client.answers import BackedUp, Kept, Maintained, Part, Removal, ServiceEvent, ServiceUsage, Verified
    from trainyard.client.comparison import Comparison, Row, compare
    from trainyard.client.handles import AsyncJobHandle
    from trainyard.client.records import Run
    from trainyard.client.sync import Client, JobHandle

_MODULES = {
    "AsyncClient": "aio",
    "AsyncJobHandle": "handles",
    "BackedUp": "answers",
    "Client": "sync",
    "Comparison": "comparison",
    "JobHandle": "sync",
    "Kept": "answers",
    "Maintained": "answers",
    "Part": "answers",
    "Removal": "answers",
    "Row": "comparison",
    "Run": "records",
    "ServiceEvent": "answers",
    "ServiceUsage": "answers",
    "Verified": "answers",
    "compare": "comparison",
}
__all__ = [
    "AsyncClient",
    "AsyncJobHandle",
    "BackedUp",
    "Client",
    "Comparison",
    "JobHandle",
    "Kept",
    "Maintained",
    "Part",
    "Removal",
    "Row",
    "Run",
    "ServiceEvent",
    "ServiceUsage",
    "Verified",
    "compare",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"trainyard.client.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'trainyard.client' has no attribute '{name}'; it has {', '.join(__all__)}")
