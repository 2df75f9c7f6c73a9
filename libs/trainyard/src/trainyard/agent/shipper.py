"""Delivers points and lines to the metrics service, each exactly once.

Every writer's records are numbered. A round sends what is new of every writer, waits for the acknowledgements, and
begins again; when the stream breaks, metrics is asked what it has, and the next round goes on there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

import grpc
from trainyard_protos.v1 import metrics_pb2
from trainyard_protos.v1.metrics_pb2_grpc import MetricsServiceStub

from trainyard.agent.link import Link, keep_talking

if TYPE_CHECKING:
    from trainyard_protos.v1.metrics_pb2_grpc import MetricsServiceAsyncStub

CALL_TIMEOUT_S = 30.0
ACK_TIMEOUT_S = 60.0
# Points are written into shared memory, which raises no event; they are looked for this often.
LOOK_S = 0.5


# Answers that another try would not change.
_FINAL = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.ALREADY_EXISTS,
)


class Source(Protocol):
    """Numbered records of one writer."""

    writer_id: str

    def batch(self, seq: int) -> metrics_pb2.AppendRequest | None:
        """Records from number `seq` on, without the run's id; None when there are none yet."""
        ...

    def acknowledge(self, seq: int) -> None:
        """Everything below `seq` is stored."""
        ...


class Shipper:
    """Ships the records of all sources to one run.

    Attributes:
        refused: why metrics takes nothing of this run; "" while it does.
    """

    def __init__(
        self,
        link: Link,
        run: metrics_pb2.Run,
        sources: Callable[[], Iterable[Source]],
        complain: Callable[[str], None],
    ) -> None:
        """
        Args:
            run: to be opened before anything is sent; opening twice is harmless.
            sources: called each round; there may be new ones.
            complain: called with what metrics would not take.
        """
        self._complain = complain
        self._link = link
        self._run = run
        self._sources = sources
        self._opened: metrics_pb2.Run | None = None
        self._acknowledged: dict[str, int] = {}
        self._wake = asyncio.Event()
        self._finishing = False
        self.refused = ""

    def wake(self) -> None:
        """There is something to ship."""
        self._wake.set()

    def update(self, change: Callable[[metrics_pb2.Run], None]) -> None:
        """Changes the run's facts (params, tags, notes); they are sent with the next round."""
        change(self._run)
        self._wake.set()

    async def run(self) -> None:
        """Ships until `finish` was called and everything is acknowledged, or metrics refuses the run for good."""
        await keep_talking(self._converse)

    async def finish(self, shipping: asyncio.Task[None]) -> None:
        """Waits until everything is acknowledged, or refused for good."""
        self._finishing = True
        self._wake.set()
        await shipping

    async def _converse(self) -> bool:
        self._acknowledged.clear()
        async with self._link.connect() as channel:
            stub = MetricsServiceStub(channel)
            self._opened = None  # a yard that lost its state learns of the run again
            try:
                await self._open(stub)
                return await self._ship(stub)
            except grpc.aio.AioRpcError as error:
                if error.code() in _FINAL:
                    self.refused = error.details() or "metrics refused the run"
                    return True
                raise

    async def _open(self, stub: MetricsServiceAsyncStub) -> None:
        wanted = metrics_pb2.Run()
        wanted.CopyFrom(self._run)
        if wanted == self._opened:
            return
        try:
            await stub.OpenRun(metrics_pb2.OpenRunRequest(run=wanted), timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.INVALID_ARGUMENT or self._opened is None:
                raise
            # Facts that were added are too large: points and lines go on without them.
            self._run.CopyFrom(self._opened)
            self._complain(error.details() or "facts of the run were refused")
            return
        self._opened = wanted

    async def _ship(self, stub: MetricsServiceAsyncStub) -> bool:
        append: Any = stub.Append  # the stub's type does not know that requests can be written one by one
        call = append()
        try:
            while True:
                self._wake.clear()
                finishing = self._finishing
                await self._open(stub)
                if await self._round(stub, call):
                    continue
                if finishing:
                    await call.done_writing()
                    return True
                await self._wait()
        finally:
            call.cancel()

    async def _round(self, stub: MetricsServiceAsyncStub, call: Any) -> bool:
        """One batch of every source that has something; whether any had."""
        sources = {source.writer_id: source for source in self._sources()}
        sent = 0
        for writer_id, source in sources.items():
            batch = source.batch(await self._position(stub, writer_id))
            if batch is not None:
                batch.run_id = self._run.id
                batch.writer_id = writer_id
                await call.write(batch)
                sent += 1
        for _ in range(sent):
            async with asyncio.timeout(ACK_TIMEOUT_S):
                answer = await call.read()
            if answer is grpc.aio.EOF:
                await _raise_status(call)
            self._acknowledged[answer.writer_id] = answer.next_seq
            sources[answer.writer_id].acknowledge(answer.next_seq)
        return sent > 0

    async def _position(self, stub: MetricsServiceAsyncStub, writer_id: str) -> int:
        if writer_id not in self._acknowledged:
            request = metrics_pb2.GetPositionRequest(run_id=self._run.id, writer_id=writer_id)
            answer = await stub.GetPosition(request, timeout=CALL_TIMEOUT_S)
            self._acknowledged[writer_id] = answer.next_seq
        return self._acknowledged[writer_id]

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(LOOK_S):
                await self._wake.wait()
        except TimeoutError:
            return


async def _raise_status(call: Any) -> None:
    """Turns an early end of the stream into the error it is."""
    raise grpc.aio.AioRpcError(
        await call.code() or grpc.StatusCode.UNAVAILABLE,
        await call.initial_metadata(),
        await call.trailing_metadata(),
        details=await call.details() or "the stream ended",
    )
