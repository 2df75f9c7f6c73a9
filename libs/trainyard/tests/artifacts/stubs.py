"""Stubs of a real store that count what passes, and fail where a test wants them to."""

from __future__ import annotations

import grpc


def away():
    """What a call ends with when the yard cannot be reached."""
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, "away")


class Counting:
    """Passes calls on and counts bytes of chunks; the kind of call in `fails` breaks off when its budget is spent.

    Attributes:
        calls: names of methods called, in order.
        sent: bytes of chunks that were given to a call.
        stored: bytes of calls that returned.
        received: bytes of chunks that came back.
    """

    def __init__(self, stub, *, fail_after=None):
        self._stub = stub
        self.fail_after = fail_after
        self.calls = []
        self.sent = self.stored = self.received = 0

    def __getattr__(self, name):
        method = getattr(self._stub, name)

        async def call(*arguments, **options):
            self.calls.append(name)
            return await method(*arguments, **options)

        return call

    async def PutChunks(self, messages, timeout):
        self.calls.append("PutChunks")
        size = 0

        async def passed():
            nonlocal size
            async for message in messages:
                if self.fail_after is not None and self.sent >= self.fail_after:
                    raise away()
                size += size_of(message)
                self.sent += size_of(message)
                yield message

        if self.fail_after is not None and self.sent >= self.fail_after:
            raise away()
        answer = await self._stub.PutChunks(passed(), timeout=timeout)
        self.stored += size
        return answer

    async def GetChunks(self, request, timeout):
        self.calls.append("GetChunks")
        async for message in self._stub.GetChunks(request, timeout=timeout):
            if self.fail_after is not None and self.received >= self.fail_after:
                raise away()
            self.received += size_of(message)
            yield message


def size_of(message):
    return sum(len(chunk.data) for chunk in (message, *message.more))
