"""TLS in front of a server of this machine, at an address that pods reach: what a database of others looks like."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trainyard_setup.certificates import Pair

_BLOCK = 64 * 1024


@contextmanager
def tls_front(address: str, port: int, pair: Pair, folder: Path, protocols: tuple[str, ...] = ()) -> Iterator[int]:
    """Listens on a free port of `address` and passes on what it is sent to a port of 127.0.0.1, in plain.

    Args:
        pair: certificate and key to show.
        folder: for them.
        protocols: of ALPN, which some clients insist on.
    """
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="tls front", daemon=True)
    thread.start()
    context = _context(pair, folder, protocols)

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            inner = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(_pass_on(reader, inner[1]), _pass_on(inner[0], writer))

    server = asyncio.run_coroutine_threadsafe(asyncio.start_server(accept, address, 0, ssl=context), loop).result()
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        asyncio.run_coroutine_threadsafe(_end(server), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def _context(pair: Pair, folder: Path, protocols: tuple[str, ...]) -> ssl.SSLContext:
    chain = folder / "front.pem"
    chain.write_bytes(pair.certificate + pair.key)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(chain)
    if protocols:
        context.set_alpn_protocols(list(protocols))
    return context


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while block := await reader.read(_BLOCK):
            writer.write(block)
            await writer.drain()
    writer.close()


async def _end(server: asyncio.Server) -> None:
    server.close()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
