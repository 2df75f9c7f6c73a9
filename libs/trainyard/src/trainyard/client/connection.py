"""One connection to one yard: which yard, its stubs, calls with deadlines and errors of this library."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from trainyard import channel, errors, home
from trainyard.client.contexts import Contexts, Release
from trainyard.client.statuses import from_rpc
from trainyard.endpoints import InvalidEndpoint, split_host_port

if TYPE_CHECKING:
    from trainyard_protos.v1.admin_pb2_grpc import (
        ArtifactAdminServiceAsyncStub,
        MetricsAdminServiceAsyncStub,
        SchedulerAdminServiceAsyncStub,
    )
    from trainyard_protos.v1.artifacts_pb2_grpc import ArtifactServiceAsyncStub
    from trainyard_protos.v1.launcher_pb2_grpc import LauncherServiceAsyncStub
    from trainyard_protos.v1.metrics_pb2_grpc import MetricsServiceAsyncStub
    from trainyard_protos.v1.scheduler_pb2_grpc import SchedulerServiceAsyncStub
    from trainyard_protos.v1.yard_pb2_grpc import YardServiceAsyncStub

    from trainyard.client.forward import Forward

logger = logging.getLogger(__name__)

CALL_DEADLINE_S = 30.0
CONNECT_S = 2.0
"""How long the first call waits for anything to listen at the yard's address."""
RECONNECT_S = 8.0
"""How long a call waits for a connection that was lost before; more than the channel's own pause between tries."""
PATIENCE_S = 30.0
"""How long a stream waits for a yard of this machine that went away without saying so."""
PATIENCE_ELSEWHERE_S = 300.0
"""The same for a yard elsewhere: a cluster takes its time to bring a gateway to another machine."""
_LOOK_S = 2.0
_PAUSE_S = 0.5
"""Between two calls to a service that is away behind a proxy that answers: no connection says when it is back."""
NO_YARD = "NoYard"
HOW_TO_START = "start one with 'yard up'; 'yard run FILE' starts one for the length of a job"
"""Reason of the error when no yard is named and none runs on this machine."""

Answer = TypeVar("Answer")


@dataclass(slots=True)
class Outage:
    """Since when one reader waits for a yard that it had reached before; a try that fails does not begin it again."""

    since_s: float | None = None
    """Of the steady clock; None while the yard answers."""

    def over(self) -> None:
        """The yard has answered."""
        self.since_s = None


@dataclass(frozen=True, slots=True)
class Target:
    """Where a yard is, and what to show it."""

    endpoint: str
    token: str
    ca_file: Path | None = None
    home: Path | None = None
    """Folder of the yard when it runs on this machine."""
    ephemeral: bool = False
    read_only: bool = False
    """Whether it answers reads alone, for as long as no yard is up."""
    release: Release | None = None
    """The release whose yard it is, when it is reached through a cluster: it says the rest once it is connected."""


def find(endpoint: str | None = None, token: str | None = None, ca_file: Path | None = None) -> Target:
    """The yard to talk to: the arguments, else `TRAINYARD_ENDPOINT`, `TRAINYARD_TOKEN` and `TRAINYARD_CA_FILE`, else
    the current context, which without any is the yard of this machine.

    Raises:
        NotRunning: none is named and none runs here.
        NotFound: there is no context of the name that is set.
        Refused: there is no token.
    """
    endpoint = endpoint or os.environ.get("TRAINYARD_ENDPOINT")
    token = token or os.environ.get("TRAINYARD_TOKEN")
    ca_name = os.environ.get("TRAINYARD_CA_FILE")
    ca_file = ca_file or (Path(ca_name) if ca_name else None)
    if endpoint:
        return Target(endpoint, token or _token_of(home.home()), ca_file)
    folder = home.home()
    context = Contexts(folder).chosen()
    if isinstance(context, Release):
        return Target("", token or context.token, ca_file, release=context)
    if context is not None:
        return Target(context.endpoint, token or context.token, ca_file or (Path(context.ca) if context.ca else None))
    found = here(folder, token)
    return replace(found, ca_file=ca_file or found.ca_file)


def here(folder: Path, token: str | None = None, *, reading: bool = False) -> Target:
    """The yard of this machine that serves a home, whichever yard commands talk to.

    Args:
        reading: the one that only reads, which commands share while no yard is up.

    Raises:
        NotRunning: none does.
        Refused: there is no token.
    """
    found = home.read_endpoint(folder, home.READER_FILE if reading else home.YARD_FILE)
    if found is None:
        raise errors.NotRunning(f"no yard is running in {folder}", reason=NO_YARD, hint=HOW_TO_START)
    ca_file = Path(found.ca) if found.ca else None
    return Target(found.endpoint, token or _token_of(folder), ca_file, folder, found.ephemeral, read_only=reading)


def _token_of(folder: Path) -> str:
    try:
        return home.token(folder)
    except OSError as error:
        raise errors.Refused(
            f"no token: {folder / home.TOKEN_FILE}: {error.strerror}", hint="set TRAINYARD_TOKEN", reason="NoToken"
        ) from error


def _forward(target: Target) -> Forward | None:
    """The way to a yard that is reached through its cluster; raises YardError."""
    if target.release is None:
        return None
    try:
        from trainyard.client.forward import Forward
    except ModuleNotFoundError as error:
        raise errors.InvalidArgument(
            f"{target.release} is reached through its cluster, for which the package {error.name} is missing",
            reason="PackageMissing",
            hint="pip install 'trainyard[cluster]'",
        ) from error
    return Forward(replace(target.release, token=target.token))


class Connection:
    """Stubs of a yard's services, and the one way to call them.

    Args:
        target: the yard.

    Raises:
        InvalidArgument: the endpoint needs a root certificate, or it cannot be read.
        YardError: the yard of a release cannot be reached; it says why.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self._forward = way = _forward(target)
        self._looked = False
        try:
            if way is not None:
                self._channel = channel.connect(way.endpoint, way.token, target.ca_file or way.ca, way.server_name)
            else:
                self._channel = channel.connect(target.endpoint, target.token, target.ca_file)
        except (ValueError, OSError) as error:
            if way is not None:
                way.close()
            hint = "" if isinstance(error, InvalidEndpoint) else "set TRAINYARD_CA_FILE"
            raise errors.InvalidArgument(str(error), reason="BadEndpoint", hint=hint) from error

    @cached_property
    def scheduler(self) -> SchedulerServiceAsyncStub:
        from trainyard_protos.v1.scheduler_pb2_grpc import SchedulerServiceStub

        return SchedulerServiceStub(self._channel)

    @cached_property
    def launcher(self) -> LauncherServiceAsyncStub:
        from trainyard_protos.v1.launcher_pb2_grpc import LauncherServiceStub

        return LauncherServiceStub(self._channel)

    @cached_property
    def metrics(self) -> MetricsServiceAsyncStub:
        from trainyard_protos.v1.metrics_pb2_grpc import MetricsServiceStub

        return MetricsServiceStub(self._channel)

    @cached_property
    def artifacts(self) -> ArtifactServiceAsyncStub:
        from trainyard_protos.v1.artifacts_pb2_grpc import ArtifactServiceStub

        return ArtifactServiceStub(self._channel)

    @cached_property
    def scheduler_admin(self) -> SchedulerAdminServiceAsyncStub:
        from trainyard_protos.v1.admin_pb2_grpc import SchedulerAdminServiceStub

        return SchedulerAdminServiceStub(self._channel)

    @cached_property
    def metrics_admin(self) -> MetricsAdminServiceAsyncStub:
        from trainyard_protos.v1.admin_pb2_grpc import MetricsAdminServiceStub

        return MetricsAdminServiceStub(self._channel)

    @cached_property
    def artifacts_admin(self) -> ArtifactAdminServiceAsyncStub:
        from trainyard_protos.v1.admin_pb2_grpc import ArtifactAdminServiceStub

        return ArtifactAdminServiceStub(self._channel)

    @cached_property
    def yard(self) -> YardServiceAsyncStub:
        from trainyard_protos.v1.yard_pb2_grpc import YardServiceStub

        return YardServiceStub(self._channel)

    async def call(
        self, method: Callable[..., Awaitable[Answer]], request: object, timeout_s: float = CALL_DEADLINE_S
    ) -> Answer:
        """One request, one answer.

        Raises:
            YardError: the call failed, or there was no answer for `timeout_s` seconds.
        """
        await self._way_open()
        # After a lost connection the channel pauses before it tries again, and would fail calls meanwhile, though the
        # yard may be back already.
        reconnecting = self._channel.get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE
        if reconnecting:
            timeout_s = min(timeout_s, RECONNECT_S)
        try:
            return await method(request, timeout=timeout_s, wait_for_ready=reconnecting)
        except grpc.aio.AioRpcError as error:
            raise self._failure(error) from None

    async def stream(self, method: Callable[..., Any], request: object) -> AsyncIterator[Any]:
        """One request, many answers; the call ends when the iterator is closed.

        Raises:
            YardError: the call failed.
        """
        await self._way_open()
        call = method(request)
        try:
            async for message in call:
                yield message
        except grpc.aio.AioRpcError as error:
            raise self._failure(error) from None
        finally:
            call.cancel()

    async def _way_open(self) -> None:
        """Gives a way through a cluster some time to be there: gRPC calls one that is slow one that failed.

        Raises:
            NotRunning: nothing listens at the address: a machine that is off answers no attempt to connect.
        """
        if self._forward is None and not self._looked:
            await self._look()
        if self._forward is not None and self._channel.get_state() is not grpc.ChannelConnectivity.READY:
            with suppress(TimeoutError):  # the call itself says what is wrong
                await asyncio.wait_for(self._channel.channel_ready(), RECONNECT_S)

    async def _look(self) -> None:
        """Connects once, before the first call. gRPC waits longer, since it counts what a busy yard does as well."""
        host, port = split_host_port(self.target.endpoint)
        try:
            async with asyncio.timeout(CONNECT_S):
                _, writer = await asyncio.open_connection(host, port)
        except TimeoutError:
            failure = errors.NotRunning(f"nothing answers at {self.target.endpoint} within {CONNECT_S:g} s")
            failure.hint = self._where_to_look()
            raise failure from None
        except OSError:
            return  # the call itself says what is wrong
        self._looked = True
        writer.close()

    def _failure(self, error: grpc.aio.AioRpcError) -> errors.YardError:
        """What a failed call stands for: of a yard that was not reached, why its cluster did not let it be."""
        failure = from_rpc(error)
        if not isinstance(failure, errors.NotRunning):
            return failure
        if self._forward is not None and self._forward.trouble is not None:
            return self._forward.trouble
        if self.target.home is None and failure.reason == errors.NotRunning.__name__:  # 'yard up' would not help
            failure.hint = self._where_to_look()
        return failure

    def _where_to_look(self) -> str:
        where = self.target.release or self.target.endpoint
        return f"see whether the yard runs at {where}; 'yard context list' shows where commands go"

    async def until_back(self, lost: errors.NotRunning, outage: Outage) -> None:
        """Waits for a yard that was lost, for instance because it was killed and is started again.

        Warns at the first loss of an outage. A service that is lost behind a proxy, which answers for it, may not be
        back yet: its next call shows.

        Raises:
            NotRunning: `lost` itself, when the yard ended for good or stays away for too long: `PATIENCE_S` seconds on
                this machine, `PATIENCE_ELSEWHERE_S` elsewhere.
            YardError: waiting cannot help: its cluster does not have the release any more, or does not let the user in.
        """
        patience_s = PATIENCE_ELSEWHERE_S
        if self.target.home is not None:
            yard = home.read_yard_file(self.target.home)
            if yard is None or (yard.ephemeral and not yard.alive):  # nobody starts a yard of one command again
                raise lost
            patience_s = PATIENCE_S
        if outage.since_s is None:
            # Who has set up no logging reads a warning on stderr, users of the command line among them.
            logger.warning("the yard does not answer (%s); waiting for up to %.0f s", lost, patience_s)
            outage.since_s = time.monotonic()
        deadline = outage.since_s + patience_s
        if self._channel.get_state() is grpc.ChannelConnectivity.READY:
            await asyncio.sleep(_PAUSE_S)
        while (left_s := deadline - time.monotonic()) > 0:
            with suppress(TimeoutError):
                return await asyncio.wait_for(self._channel.channel_ready(), min(_LOOK_S, left_s))
            trouble = self._forward.trouble if self._forward is not None else None
            if trouble is not None and not isinstance(trouble, errors.NotRunning):
                raise trouble
        raise lost

    async def close(self) -> None:
        """Ends it, and the way to the yard."""
        await self._channel.close()
        if self._forward is not None:
            self._forward.close()
