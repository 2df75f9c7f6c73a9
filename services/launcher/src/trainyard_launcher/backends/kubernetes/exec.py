"""A shell in a worker's container, through the API server.

The command runs under the agent's `shell` module, which gives it the folder and environment of the worker. A connection
that ends does not end what runs in the pod, so what is left is ended by a second command. One byte in front of each
message says what it is (protocol v5 of Kubernetes' remote commands).
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Sequence

import aiohttp
from servicekit.ids import new_id
from trainyard.cluster import Api, ApiError

from trainyard_launcher.backend import ShellRequest, StartError
from trainyard_launcher.backends.kubernetes.manifests import AGENT_FOLDER, NODE_FOLDER, WORKER

_PROTOCOL = "v5.channel.k8s.io"
_STDIN, _STDOUT, _STDERR, _STATUS, _RESIZE, _CLOSE = 0, 1, 2, 3, 4, 255
_UNKNOWN_CODE = 255
_END_S = 20
_HELPER = (f"{AGENT_FOLDER}/bin/python", "-m", "trainyard.agent.shell")

logger = logging.getLogger(__name__)


class PodShell:
    """A command in a pod."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, api: Api, path: str, identity: str) -> None:
        self._socket = socket
        self._api, self._path, self._identity = api, path, identity
        self._code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._resizes: set[asyncio.Task[None]] = set()

    @classmethod
    async def open(cls, api: Api, pod_path: str, request: ShellRequest) -> PodShell:
        """Starts the command.

        Raises:
            StartError: the API server does not let it.
        """
        path, identity = f"{pod_path}/exec", new_id()
        command = [*_HELPER, NODE_FOLDER, str(request.worker_pid), identity, *request.command]
        streams = ["stdin", "stdout", "tty" if request.tty else "stderr"]
        try:
            socket = await api.websocket(path, _params(streams, command), _PROTOCOL)
        except ApiError as error:
            raise StartError(
                f"no shell in the pod: {error}; does the launcher's role allow create on pods/exec?"
            ) from error
        shell = cls(socket, api, path, identity)
        if request.tty:
            await shell._resize(request.rows, request.columns)
        return shell

    async def output(self) -> AsyncIterator[bytes]:
        """What the command writes, until it has ended."""
        async for message in self._socket:
            if message.type is not aiohttp.WSMsgType.BINARY or not message.data:
                continue
            channel, data = message.data[0], message.data[1:]
            if channel in (_STDOUT, _STDERR) and data:
                yield data
            elif channel == _STATUS:
                self._ended(_exit_code(data))
        self._ended(_UNKNOWN_CODE)

    def _ended(self, code: int) -> None:
        if not self._code.done():
            self._code.set_result(code)

    async def write(self, data: bytes) -> None:
        """Hands input to the command; input for one that has ended is dropped."""
        await self._send(_STDIN, data)

    async def close_stdin(self) -> None:
        """No more input."""
        await self._send(_CLOSE, bytes([_STDIN]))

    def resize(self, rows: int, columns: int) -> None:
        """The user's window has another size."""
        task = asyncio.ensure_future(self._resize(rows, columns))
        self._resizes.add(task)
        task.add_done_callback(self._resizes.discard)

    async def _resize(self, rows: int, columns: int) -> None:
        await self._send(_RESIZE, json.dumps({"Width": columns, "Height": rows}).encode())

    async def _send(self, channel: int, data: bytes) -> None:
        if not self._socket.closed:
            await self._socket.send_bytes(bytes([channel]) + data)

    async def wait(self) -> int:
        """The exit code."""
        return await self._code

    async def close(self) -> None:
        """Ends the command and everything it started."""
        await self._socket.close()
        if self._code.done():
            return
        try:
            ending = await self._api.websocket(
                self._path, _params(["stdout"], [*_HELPER, "--end", self._identity]), _PROTOCOL
            )
            async with asyncio.timeout(_END_S):
                async for _ in ending:
                    pass  # to its end
        except (ApiError, TimeoutError):
            logger.info("shell not ended: its pod is gone, or ends it")


def _params(streams: Sequence[str], command: Sequence[str]) -> list[tuple[str, str]]:
    return [("container", WORKER), *((each, "true") for each in streams), *(("command", each) for each in command)]


def _exit_code(status: bytes) -> int:
    """From the status that ends a remote command."""
    try:
        found = json.loads(status)
        if found.get("status") == "Success":
            return 0
        causes = found.get("details", {}).get("causes", ())
        return next(int(each["message"]) for each in causes if each.get("reason") == "ExitCode")
    except (ValueError, StopIteration, AttributeError, KeyError):
        return _UNKNOWN_CODE
