"""One `yard run`: submission, live view, interruptions, end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from trainyard import errors
from trainyard.cli.boundary import ExitCode
from trainyard.client import AsyncClient
from trainyard.client.connection import NO_YARD

if TYPE_CHECKING:
    from trainyard_protos.v1 import scheduler_pb2 as pb

    from trainyard.cli.run.views import View
    from trainyard.client.attachment import Attachment
    from trainyard.client.documents import Document

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


async def run(source: Document) -> int | None:
    """Runs a job in the yard that is up; returns the exit code of `yard run`, or None when that yard is ending."""
    received: asyncio.Queue[signal.Signals] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, received.put_nowait, number)

    async def work(client: AsyncClient, held: Attachment | None) -> int:
        submission = asyncio.create_task(client.submit_document(source))
        # The request leaves now; the view is imported while the yard works on it.
        await asyncio.sleep(0)
        from trainyard.cli.run.views import make_view

        job = (await submission).job
        if held:
            await held.hold(job.id)
        session = _Session(client, job, make_view(job), received, held)
        try:
            code = await session.to_the_end()
        except errors.NeverFits:
            if held:  # else the yard stays up for it
                await client.cancel(job.id, "no machine can hold it")
            raise
        if held:
            await held.hold(job.id, detached=True)
        return code

    return await _attached(work)


async def attached(work: Callable[[AsyncClient], Awaitable[int]]) -> int | None:
    """Runs work in the yard that is up; returns what it returns, or None when that yard is ending."""
    return await _attached(lambda client, _: work(client))


async def _attached(work: Callable[[AsyncClient, Attachment | None], Awaitable[int]]) -> int | None:
    try:
        client = AsyncClient()
    except errors.NotRunning as error:
        if error.reason != NO_YARD:
            raise
        return None
    async with client:
        try:
            held = await client.attach() if client.ephemeral else None
        except errors.NotRunning:
            return None
        return await work(client, held)


class _Session:
    def __init__(
        self,
        client: AsyncClient,
        job: pb.Job,
        view: View,
        received: asyncio.Queue[signal.Signals],
        held: Attachment | None,
    ) -> None:
        self._client = client
        self._job = job
        self._view = view
        self._received = received
        self._held = held

    async def to_the_end(self) -> int:
        from trainyard.cli.run.watching import show

        shown = asyncio.create_task(show(self._client, self._job, self._view))
        stopped = asyncio.create_task(self._received.get())
        try:
            await asyncio.wait({shown, stopped}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
            self._view.close()
        if shown.done():
            shown.result()
            return await self._sum_up()
        shown.cancel()
        await asyncio.wait({shown})
        return await self._interrupted(stopped.result())

    async def _sum_up(self) -> int:
        from trainyard.cli.run.summary import exit_code, sum_up

        job = await self._client.get(self._job.id)
        await sum_up(self._client, job)
        return exit_code(job)

    async def _interrupted(self, by: signal.Signals) -> int:
        from trainyard.cli.run import interrupts

        if by is signal.SIGINT:
            if self._held:  # the yard confirms it before the message that the job outlives this process
                await self._held.hold(self._job.id, detached=True)
            leave = await interrupts.offer(self._job, self._received)
        else:
            leave = interrupts.Wish.CANCEL if self._held else interrupts.Wish.DETACH
        if leave is interrupts.Wish.CANCEL:
            return await self._cancel()
        return ExitCode.INTERRUPTED

    async def _cancel(self) -> int:
        with suppress(errors.Conflict):  # it has just ended
            await self._client.cancel(self._job.id, "asked for in yard run")
        await self._client.wait(self._job.id)  # read again: as submitted it may not have fitted
        return await self._sum_up()
