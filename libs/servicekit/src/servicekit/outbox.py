"""The transactional outbox: a message is a row written with the state change it announces, and sent after the commit.

A crash between the two sends it again at the next start, so a consumer must be idempotent: ours claims by fence.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import sqlalchemy
from sqlmodel import Field, Session, SQLModel

from servicekit.store import Store

if TYPE_CHECKING:
    from celery import Celery

logger = logging.getLogger(__name__)

_BATCH = 500
_RETRY_S = 1.0


class OutboxRow(SQLModel):  # type: ignore[no-redef]  # it has a field `kwargs`
    """Columns of an outbox; a service makes its table of it: `class Outbox(OutboxRow, table=True)`."""

    id: int | None = Field(default=None, primary_key=True)
    queue: str
    task: str
    kwargs: str
    created_ns: int = Field(sa_type=sqlalchemy.BigInteger)


class Publisher:
    """Sends what stands in an outbox, woken by `wake`, and deletes what was sent.

    Without Celery it must not be started.
    """

    def __init__(self, store: Store, table: type[OutboxRow], celery: Celery | None) -> None:
        self._store = store
        self._table = sqlalchemy.inspect(table).local_table
        self._celery = celery
        self._wanted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.backlog = 0

    def start(self) -> None:
        """Begins with what an earlier process left unsent."""
        self._wanted.set()
        self._task = asyncio.create_task(self._run(), name="outbox")

    def wake(self) -> None:
        """Called after a commit that wrote outbox rows."""
        self._wanted.set()

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            try:
                while await self._publish_batch():
                    pass
            except Exception:
                # The broker or the database is away; rows stay and are sent later.
                logger.exception("outbox: sending failed, trying again")
                await asyncio.sleep(_RETRY_S)
                self._wanted.set()

    async def _publish_batch(self) -> bool:
        rows = await self._store.read(self._oldest)
        self.backlog = len(rows)
        if not rows:
            return False
        await asyncio.get_running_loop().run_in_executor(None, self._send, rows)
        ids = [row.id for row in rows]
        await self._store.write(lambda session: self._delete(session, ids))
        return len(rows) == _BATCH

    def _oldest(self, session: Session) -> Sequence[Any]:
        return session.execute(sqlalchemy.select(self._table).order_by(self._table.c.id).limit(_BATCH)).all()

    def _send(self, rows: Sequence[Any]) -> None:
        assert self._celery is not None, "it was started"
        with self._celery.producer_or_acquire() as producer:
            for row in rows:
                self._celery.send_task(
                    row.task, kwargs=json.loads(row.kwargs), queue=row.queue, producer=producer, ignore_result=True
                )

    def _delete(self, session: Session, ids: list[int]) -> None:
        session.execute(sqlalchemy.delete(self._table).where(self._table.c.id.in_(ids)))
