"""One stream of batches: a reader stages them ahead, acknowledgements follow in order.

What may wait to be stored is bounded in bytes, by stream and over all streams, and in batches; beyond that the stream
is not read, and flow control slows its sender. A batch stops counting once it is durable: who does not read
acknowledgements holds up nobody but itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

from servicekit.budget import Budget
from servicekit.errors import InvalidArgument
from trainyard_protos.v1 import metrics_pb2 as pb

from trainyard_metrics.closing import Admission
from trainyard_metrics.runlog import RunLog
from trainyard_metrics.runlogs import RunLogs
from trainyard_metrics.settings import Settings


@dataclass(frozen=True, slots=True)
class _Staged:
    log: RunLog
    writer_id: str
    durable: asyncio.Future[None]


class AppendStream:
    """Serves one Append call."""

    def __init__(self, logs: RunLogs, settings: Settings, admit: Callable[[str], Awaitable[Admission]]) -> None:
        self._logs = logs
        self._settings = settings
        self._admit = admit
        self._open: dict[str, tuple[Admission, RunLog]] = {}
        self._waiting: asyncio.Queue[_Staged | Exception | None] = asyncio.Queue(settings.max_stream_batches)
        self._budgets = (Budget(settings.max_stream_bytes), logs.waiting)

    async def serve(self, requests: AsyncIterator[pb.AppendRequest]) -> AsyncIterator[pb.AppendResponse]:
        """Acknowledgements of what comes in; the first error ends the stream, after what was before it.

        Raises:
            ServiceError: see `RunLog.stage`.
        """
        async with AsyncExitStack() as stack:
            reader = asyncio.create_task(self._read(requests, stack))
            try:
                while (staged := await self._waiting.get()) is not None:
                    if isinstance(staged, Exception):
                        raise staged
                    yield await self._acknowledge(staged)
            finally:
                reader.cancel()
                await asyncio.gather(reader, return_exceptions=True)

    async def _acknowledge(self, staged: _Staged) -> pb.AppendResponse:
        # Others may wait for the same future, so that this call's end must not cancel it.
        await asyncio.shield(staged.durable)
        return pb.AppendResponse(
            run_id=staged.log.run_id, writer_id=staged.writer_id, next_seq=staged.log.position(staged.writer_id)
        )

    async def _read(self, requests: AsyncIterator[pb.AppendRequest], stack: AsyncExitStack) -> None:
        try:
            async for request in requests:
                await self._waiting.put(await self._stage(request, stack))
        except Exception as error:
            await self._waiting.put(error)
        else:
            await self._waiting.put(None)

    async def _stage(self, request: pb.AppendRequest, stack: AsyncExitStack) -> _Staged:
        size = request.ByteSize()
        if size > self._settings.max_batch_bytes:
            raise InvalidArgument(
                f"a batch of {size:,} bytes",
                reason="BatchTooLarge",
                hint=f"send at most {self._settings.max_batch_bytes:,} at a time",
            )
        if request.run_id not in self._open:
            admission = await self._admit(request.run_id)
            log = await stack.enter_async_context(self._logs.use(request.run_id))
            self._open[request.run_id] = admission, log
        admission, log = self._open[request.run_id]
        for budget in self._budgets:
            await budget.take(size)
        try:
            admission.check(request.writer_id)
            durable = log.stage(request)
        except BaseException:
            self._give_back(size)
            raise
        durable.add_done_callback(lambda _: self._give_back(size))
        return _Staged(log, request.writer_id, durable)

    def _give_back(self, size: int) -> None:
        for budget in self._budgets:
            budget.give_back(size)
