"""The summary of one run as it is kept in memory, and how much of it the database has."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from trainyard_protos.v1.metrics_pb2 import AppendRequest

from trainyard_metrics import summary_rows
from trainyard_metrics.domain.summary import Summary
from trainyard_metrics.runs import Facts


@dataclass
class Tracked:
    """The summary of one run, in memory.

    Attributes:
        summary: to be read in the event loop.
        writers: streams that may append to the run.
        marked: dirty in the database.
        saved: the revision that is in the database; -1 when all of it is to be written.
        touched: monotonic time of the last change.
        making: the task that makes the summary anew.
        backlog: what was stored meanwhile.
        failed: it could not be made anew: the summary means nothing.
    """

    run: Facts
    summary: Summary
    marked: bool
    saved: int
    superseded: bool
    writers: int = 0
    touched: float = field(default_factory=time.monotonic)
    making: asyncio.Task[None] | None = None
    backlog: list[AppendRequest] | None = None
    failed: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def unsaved(self) -> bool:
        """Whether the database lacks something of it."""
        return not self.failed and self.backlog is None and self.saved != self.summary.revision

    @property
    def settled(self) -> bool:
        """Whether the database has all of it."""
        return not self.failed and self.making is None and not self.unsaved

    def add(self, requests: Iterable[AppendRequest]) -> None:
        """Takes note of records that are durable."""
        self.touched = time.monotonic()
        for request in requests:
            if not request.HasField("rows"):
                continue
            if self.backlog is None:
                self.summary.add_rows(request.rows)
            else:
                self.backlog.append(request)

    def row(self) -> summary_rows.Saved:
        """What is to be written of it."""
        return summary_rows.Saved(
            run_id=self.run.id,
            packed=self.summary.pack(),
            updated_ns=self.summary.last_time_ns,
            values=dict(self.summary.leads(self.saved)),
            afresh=self.saved < 0,
        )
