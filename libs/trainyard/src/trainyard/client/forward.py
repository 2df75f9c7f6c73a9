"""A port of this machine that leads to the yard of a release.

gRPC connects to the port, and each of its connections becomes one through the cluster's API server to a pod of the
gateway that is ready at that moment. So the port stays the same while pods are replaced, and what follows a job goes
on after gRPC has connected again. The port's work is done on a thread of its own, until it is closed.
"""

from __future__ import annotations

import asyncio

import aiohttp

from trainyard import errors
from trainyard.client.contexts import Release
from trainyard.client.loop import Loop
from trainyard.client.releases import Gateway, api_of
from trainyard.cluster import Api

_DATA, _ERROR = 0, 1
_READ_BYTES = 256 * 1024
_READY_S, _LOOK_S = 20.0, 0.5


class Forward:
    """Open from its making until `close`. Making it asks the cluster a few questions and waits for the answers.

    Args:
        release: whose yard it is.

    Attributes:
        endpoint: `host:port` to connect to.
        server_name: the name that the certificate there holds.
        ca: root certificate (PEM).
        token: bearer token of the release's users.
        trouble: why the newest connection was not made; None when it was.

    Raises:
        NotFound: there is no such kube context or release.
        NotRunning: the cluster does not answer, or no gateway is ready.
        Refused: the cluster does not let the user do this.
    """

    def __init__(self, release: Release) -> None:
        self.endpoint = self.server_name = self.token = ""
        self.ca = b""
        self.trouble: errors.YardError | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._loop = Loop()
        self._api: Api | None = None
        self._server: asyncio.Server | None = None
        try:
            self._loop.run(self._open(release))
        except BaseException:
            self.close()
            raise

    async def _open(self, release: Release) -> None:
        self._api = api_of(release)
        self._gateway = await Gateway.find(self._api, release)
        await self._until_ready()
        self.server_name = self._gateway.host
        self.ca = await self._gateway.ca()
        self.token = release.token or await self._gateway.token()
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.endpoint = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _until_ready(self) -> None:
        """Returns when a pod is ready, which one that is starting or busy soon is; raises YardError."""
        deadline = asyncio.get_running_loop().time() + _READY_S
        while True:
            try:
                await self._gateway.ready_pod()
                return
            except errors.NotRunning as error:
                if asyncio.get_running_loop().time() > deadline or "pod" not in error.fields:
                    raise
            await asyncio.sleep(_LOOK_S)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with await self._gateway.connect() as socket:
                self.trouble = None
                await _joined(reader, writer, socket)
        except errors.YardError as error:
            self.trouble = error
        except (OSError, aiohttp.ClientError):
            pass  # either side went away, which the other one sees now
        finally:
            writer.close()

    def close(self) -> None:
        """Ends the connections and gives the port back."""
        self._loop.run(self._end())
        self._loop.close()

    async def _end(self) -> None:
        if self._server is not None:
            self._server.close()
        connections = [*self._connections]
        for each in connections:
            each.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
        if self._api is not None:
            await self._api.close()


async def _joined(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, socket: aiohttp.ClientWebSocketResponse
) -> None:
    """Carries bytes both ways until one side ends.

    Raises:
        NotRunning: the pod cannot be reached on the port.
    """
    ways = [asyncio.ensure_future(_upwards(reader, socket)), asyncio.ensure_future(_downwards(socket, writer))]
    try:
        ended, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
    for way in ended:
        way.result()


async def _upwards(reader: asyncio.StreamReader, socket: aiohttp.ClientWebSocketResponse) -> None:
    while data := await reader.read(_READ_BYTES):
        await socket.send_bytes(bytes([_DATA]) + data)


async def _downwards(socket: aiohttp.ClientWebSocketResponse, writer: asyncio.StreamWriter) -> None:
    opened: set[int] = set()
    async for message in socket:
        if message.type is not aiohttp.WSMsgType.BINARY or not message.data:
            continue
        channel = message.data[0]
        if channel not in opened:  # the first message of a channel is the number of its port
            opened.add(channel)
        elif channel == _DATA:
            writer.write(memoryview(message.data)[1:])
            await writer.drain()
        elif channel == _ERROR:
            raise errors.NotRunning(
                f"the gateway's pod was not reached: {message.data[1:].decode(errors='replace').strip()}",
                reason="GatewayNotReady",
                hint="see whether its pods are ready",
            )
