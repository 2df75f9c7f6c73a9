"""A job's events, output and reason to wait, brought to a view until the job has ended."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from trainyard_protos.v1 import scheduler_pb2 as pb

from trainyard import errors
from trainyard.client import states
from trainyard.client.jobs import check_fits

if TYPE_CHECKING:
    from trainyard.cli.run.views import View
    from trainyard.client import AsyncClient

_LAST_LINES_S = 30.0
"""How long output may lag behind the end of the job."""
_REFRESH_S = 0.5
_SLOW_START_S = 10.0
"""A start that takes longer is explained, and again after twice as long."""


async def show(client: AsyncClient, job: pb.Job, view: View) -> None:
    """Returns when the job has ended and its output was shown.

    Raises:
        NeverFits: it is queued, and no machine can hold it.
        YardError: the yard was lost.
    """
    view.submitted(job)
    output = asyncio.create_task(_output(client, job, view))
    waiting = asyncio.create_task(_pending(client, job, view))
    ended = asyncio.create_task(_states(client, job, view, waiting))
    try:
        while not (ended.done() or output.done()):
            running = {task for task in (ended, output, waiting) if not task.done()}
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            if waiting.done() and not waiting.cancelled():
                waiting.result()
        if output.done():
            output.result()
        await ended
        await asyncio.wait({output}, timeout=_LAST_LINES_S)
        if output.done():
            output.result()
    finally:
        for task in (output, waiting, ended):
            task.cancel()
        await asyncio.gather(output, waiting, ended, return_exceptions=True)


async def _states(client: AsyncClient, job: pb.Job, view: View, waiting: asyncio.Task[None]) -> None:
    slow: asyncio.Task[None] | None = None
    try:
        async for event in client.watch(job.id, job.event_seq):
            if event.state != pb.JOB_STATE_QUEUED:
                waiting.cancel()
            if slow is not None:
                slow.cancel()
            if event.state == pb.JOB_STATE_QUEUED:
                check_fits(await client.get(job.id))
            if event.state == pb.JOB_STATE_STARTING:
                slow = asyncio.create_task(_slow_start(client, job, view))
            view.happened(event)
            if event.state in states.ENDED:
                return
    finally:
        if slow is not None:
            slow.cancel()


async def _slow_start(client: AsyncClient, job: pb.Job, view: View) -> None:
    """Says, while nothing else happens, what a job that is starting waits for."""
    pause = _SLOW_START_S
    while True:
        await asyncio.sleep(pause)
        with suppress(errors.NotRunning):  # the stream of events waits for the yard to come back
            view.starts_slowly((await client.explain(job.id)).summary)
        pause *= 2


async def _output(client: AsyncClient, job: pb.Job, view: View) -> None:
    async for event in client.follow(job.id):
        match event.WhichOneof("event"):
            case "lines":
                view.wrote(event.lines.lines)
            case "progress":
                view.progressed(event.progress)
            case "dropped":
                view.lost(event.dropped.to_seq - event.dropped.from_seq)


async def _pending(client: AsyncClient, job: pb.Job, view: View) -> None:
    """While the job is queued: why. Whatever happens in the yard may change the reason.

    Raises:
        NeverFits: no machine can hold it.
    """
    check_fits(job)
    view.waits(job.pending)
    shown = job.pending
    async for _ in client.watch(from_now=True):
        now = await client.get(job.id)
        if now.state != pb.JOB_STATE_QUEUED:
            return
        check_fits(now)
        if now.pending != shown:
            view.waits(now.pending)
            shown = now.pending
        await asyncio.sleep(_REFRESH_S)  # events may come by the thousand
