"""A TCP relay that stands between clients and a yard, and can be cut as networks are cut.

Runs on a thread with an event loop of its own; its methods may be called from any thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from scripts.testbed.patience import PATIENCE_S

_BLOCK = 64 * 1024


class Relay:
    """Forwards connections to `target` ("host:port") until it is told not to.

    - `stall`: bytes wait, as while a cable is out: nothing is lost, and `heal` lets them go on.
    - `lose`: bytes vanish, as behind a firewall that forgot its connections: they are never told, and stay dead after
      `heal`. New connections are refused.
    - `refuse`: connections are reset and new ones are refused, as on a machine without the server.
    - `heal`: the network works.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relay", daemon=True)
        self._connections: set[_Connection] = set()
        self._state = "healthy"
        self._changed = asyncio.Event()
        self.delay_s = 0.0
        self.accepted = 0

    def __enter__(self) -> Relay:
        self._thread.start()
        self._server = self._call(asyncio.start_server(self._accept, "127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *_: object) -> None:
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def stall(self) -> None:
        self._become("stalled")

    def lose(self) -> None:
        self._become("losing")

    def refuse(self) -> None:
        self._become("refusing")

    def heal(self) -> None:
        self._become("healthy")

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)

    def _become(self, state: str) -> None:
        async def change() -> None:
            self._state = state
            for connection in self._connections:
                connection.dead |= state == "losing"
                if state == "refusing":
                    connection.abort()
            self._changed.set()
            self._changed = asyncio.Event()

        self._call(change())

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        if self._state in ("refusing", "losing"):
            return writer.transport.abort()
        connection = _Connection([writer])
        self._connections.add(connection)
        try:
            there_reader, there_writer = await asyncio.open_connection(self._host, self._port)
            connection.writers.append(there_writer)
            await asyncio.gather(
                self._forward(connection, reader, there_writer), self._forward(connection, there_reader, writer)
            )
        except OSError:
            pass  # one side is gone; the other is told below
        finally:
            self._connections.discard(connection)
            connection.abort()

    async def _forward(
        self, connection: _Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while block := await reader.read(_BLOCK):
            await asyncio.sleep(self.delay_s)
            await self._until(lambda: self._state != "stalled")
            if connection.dead:
                continue
            writer.write(block)
            await writer.drain()
        if not connection.dead:  # the end of a dead connection is not told either
            connection.abort()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()

    async def _close(self) -> None:
        self._server.close()
        for connection in tuple(self._connections):
            connection.abort()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)


class _Connection:
    """Both ends of one connection."""

    def __init__(self, writers: list[asyncio.StreamWriter]) -> None:
        self.writers = writers
        self.dead = False

    def abort(self) -> None:
        for writer in self.writers:
            writer.transport.abort()
