"""The way to the yard: the endpoint of the moment, the token of the moment, and patience.

A yard that is down, or comes back at another port, never disturbs training: every conversation is a loop that begins
again.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc

from trainyard import files
from trainyard.agent.plan import Plan
from trainyard.channel import connect

TOKEN_FILE = "token"
FIRST_BACKOFF_S = 0.1
LAST_BACKOFF_S = 5.0


class Link:
    """Makes channels to the yard.

    Attributes:
        token: the attempt's token; the launcher renews it.
    """

    def __init__(
        self,
        *,
        token: str,
        endpoint: str = "",
        endpoint_file: str = "",
        ca_file: str = "",
        token_file: Path | None = None,
    ) -> None:
        """
        Args:
            endpoint: host and port, when there is no `endpoint_file` that names the present one.
            ca_file: TLS root; "" for plaintext on loopback.
            token_file: where a renewed token is kept, for whoever goes on after this process.
        """
        self._token_file = token_file
        self._endpoint = endpoint
        self._endpoint_file = endpoint_file
        self._ca_file = Path(ca_file) if ca_file else None
        self.token = token

    @classmethod
    def of(cls, plan: Plan, folder: Path) -> Link:
        """The way to the yard that made the plan of this node's folder, with the newest token there is."""
        renewed = folder / TOKEN_FILE
        return cls(
            token=renewed.read_text() if renewed.exists() else plan.token,
            endpoint=plan.endpoint,
            endpoint_file=plan.endpoint_file,
            ca_file=plan.ca_file,
            token_file=renewed,
        )

    def renew(self, token: str) -> None:
        """From now on this token."""
        self.token = token
        if self._token_file is not None:
            files.replace(self._token_file, token.encode())

    def endpoint(self) -> str:
        """Where the yard is now, as far as this machine knows."""
        if self._endpoint_file:
            try:
                found = json.loads(Path(self._endpoint_file).read_bytes())["endpoint"]
                return str(found)
            except (OSError, ValueError, KeyError, TypeError):
                pass  # between two yards there is no such file; the last known port is kept over restarts
        return self._endpoint

    def connect(self) -> grpc.aio.Channel:
        """A new channel, for one conversation."""
        return connect(self.endpoint(), lambda: self.token, self._ca_file)


async def keep_talking(
    converse: Callable[[], Awaitable[bool]], delayed: Callable[[str], None] = lambda why: None
) -> None:
    """Repeats a conversation until it returns True. It breaks off by `AioRpcError`, or by returning False.

    Waits between tries, twice as long each time and jittered; a conversation that lasted a while starts over at once.

    Args:
        delayed: called with what keeps the other side from taking anything for now, for instance a full disk; once for
            each reason until a conversation lasts.
    """
    loop = asyncio.get_running_loop()
    backoff = FIRST_BACKOFF_S
    told = set[str]()
    while True:
        began = loop.time()
        try:
            if await converse():
                return
        except (TimeoutError, asyncio.InvalidStateError):
            pass  # the second is grpc.aio's word for a call that ended while it was written to
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.INTERNAL:
                print(f"the yard answered with a defect: {error.details()}", flush=True)  # noqa: T201 (the agent's log)
            why = error.details() or ""
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and why not in told:
                told.add(why)
                delayed(why)
        if loop.time() - began > LAST_BACKOFF_S:
            backoff = FIRST_BACKOFF_S
            told.clear()
        await asyncio.sleep(backoff * random.uniform(0.5, 1.5))
        backoff = min(backoff * 2, LAST_BACKOFF_S)
