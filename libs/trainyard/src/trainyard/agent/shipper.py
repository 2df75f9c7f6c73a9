"""Delivers rows and lines to the metrics service, each exactly once.

Every writer's records are numbered. Batches go out ahead of their acknowledgements, as many as fit into a bounded
number of bytes; when the stream breaks, metrics is asked what it has, and the next stream goes on there. Nothing is
kept in memory for that: sources can be read again from any number that is not acknowledged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import grpc
from trainyard_protos.v1 import metrics_pb2
from trainyard_protos.v1.metrics_pb2_grpc import MetricsServiceStub

from trainyard.agent.link import Link, keep_talking
from trainyard.agent.sources import Gap, Source
from trainyard.agent.window import Window

if TYPE_CHECKING:
    from trainyard_protos.v1.metrics_pb2_grpc import MetricsServiceAsyncStub

CALL_TIMEOUT_S = 30.0
ACK_TIMEOUT_S = 60.0
# Rows are written into shared memory, which raises no event; they are looked for this often.
LOOK_S = 0.25

# Answers that another try would not change.
_FINAL = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.ALREADY_EXISTS,
)


class Shipper:
    """Ships the records of all sources to one run.

    Attributes:
        refused: why metrics takes nothing of this run; "" while it does.
        missing: what metrics lacks and cannot get any more, in words, by writer.
    """

    def __init__(
        self,
        link: Link,
        run: metrics_pb2.Run,
        sources: Callable[[], Iterable[Source]],
        complain: Callable[[str], None],
        delayed: Callable[[str], None] = lambda why: None,
    ) -> None:
        """
        Args:
            run: to be opened before anything is sent; opening twice is harmless.
            sources: called each round; there may be new ones.
            complain: called with what metrics would not take.
            delayed: called with why metrics takes nothing for now.
        """
        self._complain = complain
        self._delayed = delayed
        self._link = link
        self._run = run
        self._sources = sources
        self._opened: metrics_pb2.Run | None = None  # on this connection
        self._accepted = _without_facts(run)
        self._wake = asyncio.Event()
        self._finishing = False
        self._stored: dict[str, int] = {}  # writer -> the first number that metrics does not have, as far as is known
        self._news = asyncio.Event()  # of what is stored, or never will be
        self.refused = ""
        self.missing: dict[str, str] = {}

    def wake(self) -> None:
        """There is something to ship."""
        self._wake.set()

    def update(self, change: Callable[[metrics_pb2.Run], None]) -> None:
        """Changes the run's facts (params, tags, notes); they are sent with the next round."""
        change(self._run)
        self._wake.set()

    async def run(self) -> None:
        """Ships until `finish` was called and everything is acknowledged, or metrics refuses the run for good."""
        await keep_talking(self._converse, self._delayed)

    async def finish(self, shipping: asyncio.Task[None]) -> None:
        """Waits until everything is acknowledged, or refused for good."""
        self._finishing = True
        self._wake.set()
        await shipping

    async def stored(self, positions: Mapping[str, int]) -> None:
        """Returns once metrics has every record below these numbers (by writer). `run` may end without that."""
        while self._lacks(positions):
            self._news.clear()
            await self._news.wait()

    def _lacks(self, positions: Mapping[str, int]) -> bool:
        return any(self._stored.get(writer, 0) < seq for writer, seq in positions.items() if writer not in self.missing)

    def _acknowledged(self, writer_id: str, next_seq: int) -> None:
        self._stored[writer_id] = max(next_seq, self._stored.get(writer_id, 0))
        self._news.set()

    async def _converse(self) -> bool:
        if not self._link.endpoint():
            return False  # no yard is up
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
            if error.code() is not grpc.StatusCode.INVALID_ARGUMENT or wanted == self._accepted:
                raise
            # Facts that were added are too large: rows and lines go on without them.
            self._run.CopyFrom(self._accepted)
            self._complain(error.details() or "facts of the run were refused")
            await self._open(stub)
            return
        self._opened = self._accepted = wanted

    async def _ship(self, stub: MetricsServiceAsyncStub) -> bool:
        append: Any = stub.Append  # the stub's type does not know that requests can be written one by one
        call = append()
        window = Window()
        reading = asyncio.create_task(self._read(call, window))
        try:
            await self._talk(stub, call, window, reading)
        except asyncio.InvalidStateError:  # grpc.aio's word for a call that ended while it was written to
            await reading
            raise
        finally:
            call.cancel()
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        return True

    async def _talk(
        self, stub: MetricsServiceAsyncStub, call: Any, window: Window, reading: asyncio.Task[None]
    ) -> None:
        while True:
            self._wake.clear()
            finishing = self._finishing
            await self._open(stub)
            exhausted = await self._send(stub, call, window)
            if reading.done():
                reading.result()
            if exhausted and finishing and window.idle:
                await call.done_writing()
                return
            if exhausted or not window.has_room:
                await self._wait(window)

    async def _send(self, stub: MetricsServiceAsyncStub, call: Any, window: Window) -> bool:
        """A batch of every source, as far as the window has room; whether no source had any."""
        exhausted = True
        sources = {source.writer_id: source for source in self._sources()}
        for writer_id in window.by_turn(sources.keys() - self.missing.keys()):
            if not window.has_room:
                return False
            source = sources[writer_id]
            if writer_id not in window.next_seq:
                window.next_seq[writer_id] = await self._position(stub, writer_id)
                source.acknowledge(window.next_seq[writer_id])
                self._acknowledged(writer_id, window.next_seq[writer_id])
            batch = self._batch(source, window.next_seq[writer_id])
            if batch is None:
                continue
            exhausted = False
            batch.run_id = self._run.id
            batch.writer_id = writer_id
            window.sent(source, batch)
            async with asyncio.timeout(ACK_TIMEOUT_S):
                await call.write(batch)
        return exhausted

    def _batch(self, source: Source, seq: int) -> metrics_pb2.AppendRequest | None:
        try:
            return source.batch(seq)
        except Gap as gap:
            self.missing[source.writer_id] = str(gap)
            self._news.set()
            self._complain(str(gap))
            return None

    async def _position(self, stub: MetricsServiceAsyncStub, writer_id: str) -> int:
        request = metrics_pb2.GetPositionRequest(run_id=self._run.id, writer_id=writer_id)
        return (await stub.GetPosition(request, timeout=CALL_TIMEOUT_S)).next_seq

    async def _read(self, call: Any, window: Window) -> None:
        """Takes in acknowledgements until the stream ends.

        Raises:
            AioRpcError: however it ended.
        """
        try:
            while (answer := await call.read()) is not grpc.aio.EOF:
                waited_for = self._finishing or not window.has_room
                window.acknowledged(answer)
                self._acknowledged(answer.writer_id, answer.next_seq)
                if waited_for:
                    self._wake.set()
            await _raise_status(call)
        finally:
            self._wake.set()

    async def _wait(self, window: Window) -> None:
        try:
            async with asyncio.timeout(LOOK_S):
                await self._wake.wait()
        except TimeoutError:
            window.check(ACK_TIMEOUT_S)


async def _raise_status(call: Any) -> None:
    """Turns an early end of the stream into the error it is."""
    raise grpc.aio.AioRpcError(
        await call.code() or grpc.StatusCode.UNAVAILABLE,
        await call.initial_metadata(),
        await call.trailing_metadata(),
        details=await call.details() or "the stream ended",
    )


def _without_facts(run: metrics_pb2.Run) -> metrics_pb2.Run:
    """What identifies a run: metrics takes this whatever the facts beside it are."""
    bare = metrics_pb2.Run()
    bare.CopyFrom(run)
    for fact in ("params", "spec", "tags", "notes", "context"):
        bare.ClearField(fact)
    return bare
