"""How large the requests of each method may be, checked on the encoded bytes before they are parsed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

from google.protobuf.message import DecodeError

from servicekit.budget import Budget
from servicekit.errors import InvalidArgument
from servicekit.wire import Malformed, has_more_fields, shape_of

_KIB, _MIB = 1024, 1024 * 1024
_FIELDS_AT_ONCE = 20_000  # counted or parsed in a few milliseconds; more of them must not hold up other calls
_FIELDS_IN_MEMORY = 2_000_000  # of large requests, over all calls: about 240 MB when each field is an empty message
_LARGE_BYTES = 1 * _MIB


@dataclass(frozen=True, slots=True)
class RequestLimit:
    """Bounds of one message of a request.

    Args:
        size: encoded bytes.
        fields: fields, those of nested messages included.
    """

    size: int
    fields: int


DEFAULT_LIMIT = RequestLimit(256 * _KIB, 4_000)
"""Of methods that are not in `REQUEST_LIMITS`: most requests name a few things."""

REQUEST_LIMITS: Mapping[str, RequestLimit] = MappingProxyType(
    {
        "/grpc.health.v1.Health/Check": RequestLimit(1 * _KIB, 16),
        "/grpc.health.v1.Health/Watch": RequestLimit(1 * _KIB, 16),
        "/trainyard.v1.SchedulerService/Submit": RequestLimit(4 * _MIB, 4_000),
        "/trainyard.v1.SchedulerService/SubmitBatch": RequestLimit(16 * _MIB, 50_000),
        "/trainyard.v1.SchedulerService/Plan": RequestLimit(4 * _MIB, 4_000),
        "/trainyard.v1.AttemptService/RegisterPool": RequestLimit(16 * _MIB, 400_000),
        "/trainyard.v1.AttemptService/ClaimAttempts": RequestLimit(1 * _MIB, 10_000),
        "/trainyard.v1.AttemptService/ReportAttempt": RequestLimit(4 * _MIB, 10_000),
        "/trainyard.v1.AttemptService/ReportAttempts": RequestLimit(16 * _MIB, 200_000),
        "/trainyard.v1.LauncherService/Follow": RequestLimit(1 * _MIB, 100_000),
        "/trainyard.v1.LauncherService/Shell": RequestLimit(1 * _MIB, 10_000),
        "/trainyard.v1.AgentService/Session": RequestLimit(16 * _MIB, 200_000),
        "/trainyard.v1.MetricsService/OpenRun": RequestLimit(8 * _MIB, 200_000),
        "/trainyard.v1.MetricsService/Append": RequestLimit(16 * _MIB, 700_000),
        "/trainyard.v1.MetricsService/CloseAttempt": RequestLimit(4 * _MIB, 20_000),
        "/trainyard.v1.MetricsService/SearchRuns": RequestLimit(1 * _MIB, 20_000),
        "/trainyard.v1.MetricsService/ListSeries": RequestLimit(1 * _MIB, 20_000),
        "/trainyard.v1.MetricsService/QuerySeries": RequestLimit(1 * _MIB, 20_000),
        "/trainyard.v1.MetricsService/WatchSeries": RequestLimit(1 * _MIB, 20_000),
        "/trainyard.v1.ArtifactService/FindMissing": RequestLimit(1 * _MIB, 30_000),
        "/trainyard.v1.ArtifactService/GetChunks": RequestLimit(1 * _MIB, 30_000),
        "/trainyard.v1.ArtifactService/PutChunks": RequestLimit(16 * _MIB, 200_000),
        # A file's chunk is three fields of 42 bytes: the largest message full of them stays below.
        "/trainyard.v1.ArtifactService/Commit": RequestLimit(16 * _MIB, 1_300_000),
        "/trainyard.v1.ArtifactService/CommitPart": RequestLimit(16 * _MIB, 1_300_000),
    }
)
"""By full name of the method."""


def is_large(method: str) -> bool:
    """Whether requests of a method may be so large that the memory of several at a time counts."""
    return REQUEST_LIMITS.get(method, DEFAULT_LIMIT).size > _LARGE_BYTES


class Memory:
    """How many fields the large requests of all calls may have together while they are parsed and handled."""

    def __init__(self) -> None:
        self._budget = Budget(_FIELDS_IN_MEMORY)

    def share(self) -> Share:
        """What one call takes of it."""
        return Share(self._budget)


class Share:
    """The fields of the large request that one call has in memory.

    Args:
        budget: over all calls.
    """

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._taken = 0

    async def take(self, fields: int) -> None:
        """Waits until there is room for a request with this number of fields, and takes it."""
        await self._budget.take(fields)
        self._taken += fields

    def give_back(self) -> None:
        """Gives back what the call has taken: its request is not used any more."""
        if self._taken:
            self._budget.give_back(self._taken)
            self._taken = 0


class RequestReader:
    """Parses the requests of one method, once they are within its limit.

    Args:
        method: its full name.
        parse: `FromString` of its request's class.
    """

    def __init__(self, method: str, parse: Callable[[bytes], Any]) -> None:
        self._method = method
        self._parse = parse
        self._limit = REQUEST_LIMITS.get(method, DEFAULT_LIMIT)
        self._shape = shape_of(parse.__self__.DESCRIPTOR)  # type: ignore[attr-defined]  # a class method of a message

    async def read(self, raw: bytes, share: Share) -> Any:
        """The request. When it is large, it waits until `share` has room for it.

        Raises:
            InvalidArgument: RequestTooLarge, TooManyFields, or MalformedRequest.
        """
        if len(raw) > self._limit.size:
            raise InvalidArgument(
                f"a request of {len(raw):,} bytes to {self._method}",
                reason="RequestTooLarge",
                hint=f"send at most {self._limit.size:,} bytes in one message",
            )
        try:
            if not has_more_fields(raw, self._shape, min(_FIELDS_AT_ONCE, self._limit.fields)):
                return self._parse(raw)
            if self._limit.fields > _FIELDS_AT_ONCE:
                await share.take(min(len(raw) // 2, self._limit.fields))  # the most that the message can have
                return await asyncio.to_thread(self._read_many, raw)
        except (Malformed, DecodeError) as error:
            raise InvalidArgument(
                f"a request to {self._method} is not an encoded message: {error}",
                reason="MalformedRequest",
                hint="use a client of the yard's version, without compression",
            ) from None
        raise self._too_many()

    def _read_many(self, raw: bytes) -> Any:
        if has_more_fields(raw, self._shape, self._limit.fields):
            raise self._too_many()
        return self._parse(raw)

    def _too_many(self) -> InvalidArgument:
        return InvalidArgument(
            f"a request to {self._method} with more than {self._limit.fields:,} fields",
            reason="TooManyFields",
            hint="send fewer things in one message",
        )


class ParsedRequests:
    """The messages of a request stream, each parsed when it is asked for.

    Args:
        raw: the encoded messages.
        reader: parses them.
        check: raises when the caller may send no more.
        share: of the memory, for one message: what asks for the next one has finished with the one before.
    """

    def __init__(
        self, raw: AsyncIterable[bytes], reader: RequestReader, check: Callable[[], None], share: Share
    ) -> None:
        self._raw = cast("AsyncGenerator[bytes, None]", aiter(raw))  # gRPC gives a generator
        self._reader = reader
        self._check = check
        self._share = share

    def __aiter__(self) -> ParsedRequests:
        return self

    async def __anext__(self) -> Any:
        self._share.give_back()
        raw = await anext(self._raw)
        self._check()
        try:
            return await self._reader.read(raw, self._share)
        except InvalidArgument as error:
            del raw
            await self._raw.aclose()
            raise error.with_traceback(None) from None

    async def close(self) -> None:
        """Ends the stream, and frees what gRPC received for it."""
        await self._raw.aclose()
