"""One connection to one yard: which yard, its stubs, calls with deadlines and errors of this library."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from trainyard import channel, errors, home
from trainyard.client.contexts import Contexts
from trainyard.client.statuses import from_rpc

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

CALL_DEADLINE_S = 30.0
RECONNECT_S = 8.0
"""How long a call waits for a connection that was lost before; more than the channel's own pause between tries."""
PATIENCE_S = 30.0
"""How long a stream waits for a yard that went away without saying so."""

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Target:
    """Where a yard is, and what to show it."""

    endpoint: str
    token: str
    ca_file: Path | None = None
    home: Path | None = None
    """Folder of the yard when it runs on this machine."""
    ephemeral: bool = False


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
    if context is not None:
        return Target(context.endpoint, token or context.token, ca_file or (Path(context.ca) if context.ca else None))
    found = home.read_endpoint(folder)
    if found is None:
        raise errors.NotRunning(f"no yard is running in {folder}", reason="NoYard", hint="start one with 'yard up'")
    return Target(found.endpoint, token or _token_of(folder), ca_file, folder, found.ephemeral)


def _token_of(folder: Path) -> str:
    try:
        return home.token(folder)
    except OSError as error:
        raise errors.Refused(
            f"no token: {folder / home.TOKEN_FILE}: {error.strerror}", hint="set TRAINYARD_TOKEN", reason="NoToken"
        ) from error


class Connection:
    """Stubs of a yard's services, and the one way to call them."""

    def __init__(self, target: Target) -> None:
        self.target = target
        try:
            self._channel = channel.connect(target.endpoint, target.token, target.ca_file)
        except (ValueError, OSError) as error:
            raise errors.InvalidArgument(str(error), reason="BadEndpoint", hint="set TRAINYARD_CA_FILE") from error

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
        # After a lost connection the channel pauses before it tries again, and would fail calls meanwhile, though the
        # yard may be back already.
        reconnecting = self._channel.get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE
        if reconnecting:
            timeout_s = min(timeout_s, RECONNECT_S)
        try:
            return await method(request, timeout=timeout_s, wait_for_ready=reconnecting)
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error) from None

    async def stream(self, method: Callable[..., Any], request: object) -> AsyncIterator[Any]:
        """One request, many answers; the call ends when the iterator is closed.

        Raises:
            YardError: the call failed.
        """
        call = method(request)
        try:
            async for message in call:
                yield message
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error) from None
        finally:
            call.cancel()

    async def until_back(self, lost: errors.NotRunning) -> None:
        """Waits for a yard that was lost, for instance because it was killed and is started again.

        Raises:
            NotRunning: `lost` itself, when the yard ended for good or stays away for `PATIENCE_S` seconds.
        """
        if self.target.home is not None:
            yard = home.read_yard_file(self.target.home)
            if yard is None or (yard.ephemeral and not yard.alive):  # nobody starts a yard of one command again
                raise lost
        try:
            await asyncio.wait_for(self._channel.channel_ready(), PATIENCE_S)
        except TimeoutError:
            raise lost from None

    async def close(self) -> None:
        await self._channel.close()
