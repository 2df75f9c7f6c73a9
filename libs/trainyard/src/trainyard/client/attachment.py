"""Holding a yard that was started for `yard run`, for as long as this process lives."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc
from trainyard_protos.v1 import yard_pb2 as pb

from trainyard.client.statuses import from_rpc

OnLoss = pb.AttachRequest.OnLoss


class Attachment:
    """A stream that tells the yard that this process is there, and what to do when it is not.

    If this process is killed, the job it runs is cancelled: nothing is left behind by accident.
    """

    def __init__(self, call: grpc.aio.StreamStreamCall[Any, Any], workspace: str) -> None:
        self._call = call
        self._workspace = workspace

    async def hold(self, job_id: str = "", *, detached: bool = False) -> None:
        """Says which job is run here; `detached`: it goes on without this process. Returns once the yard knows.

        Raises:
            YardError: the yard is gone.
        """
        on_loss = pb.AttachRequest.ON_LOSS_KEEP if detached or not job_id else pb.AttachRequest.ON_LOSS_CANCEL
        request = pb.AttachRequest(workspace=self._workspace, job_id=job_id, on_loss=on_loss)
        try:
            with contextlib.suppress(asyncio.InvalidStateError):  # it has ended: reading says why
                await self._call.write(request)
            await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error) from None

    def release(self) -> None:
        """Leaves the yard; it acts on the last `hold`."""
        self._call.cancel()
