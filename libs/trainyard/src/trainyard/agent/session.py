"""The conversation with the launcher: one stream, on which the agent says how it goes and hears what to do."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import islice
from typing import Any

import grpc
from trainyard_protos.v1 import common_pb2, launcher_pb2
from trainyard_protos.v1.launcher_pb2_grpc import AgentServiceStub

from trainyard.agent import native
from trainyard.agent.journal import Journal
from trainyard.agent.link import Link, keep_talking
from trainyard.agent.plan import Plan

HEARTBEAT_S = 5.0
# News is told at once, but not more often than this.
NEWS_S = 0.5
LINES_PER_MESSAGE = 500
MAX_NOTES = 100

Message = launcher_pb2.AgentMessage


class Session:
    """Keeps talking to the launcher until `finish`.

    Attributes:
        on_stop: called with a `Stop` command.
        take_stacks: makes the answer to a `TakeStacks` command.
        heartbeat: makes the heartbeat of the moment.
    """

    def __init__(self, plan: Plan, link: Link, journal: Journal) -> None:
        self._plan = plan
        self._link = link
        self._journal = journal
        self._phase = Message.Phase(phase="starting")
        self._phase_is_news = False
        self._notes: list[launcher_pb2.AgentMessage.Note] = []
        self._replies: list[launcher_pb2.AgentMessage.StacksReply] = []
        self._heartbeat_s = HEARTBEAT_S
        self._news = False
        self._wake = asyncio.Event()
        self._finished = False
        self._tasks: set[asyncio.Task[None]] = set()
        self.on_stop: Callable[[launcher_pb2.AgentCommand.Stop], None] = lambda stop: None
        self.take_stacks: Callable[[], Awaitable[list[launcher_pb2.RankStacks]]] = _no_stacks
        self.heartbeat: Callable[[], launcher_pb2.AgentMessage.Heartbeat] = Message.Heartbeat
        journal.tell(self._wake.set)

    def phase(self, phase: str, exit: common_pb2.Exit | None = None) -> None:
        """Tells the launcher what the node is doing now: running, finishing or ended."""
        self._phase = Message.Phase(phase=phase, exit=exit)
        self._phase_is_news = True
        self._wake.set()

    def note(self, reason: str, text: str) -> None:
        """Something worth an event of the job."""
        if len(self._notes) < MAX_NOTES:
            self._notes.append(Message.Note(reason=reason, text=text))
        self._wake.set()

    def news(self) -> None:
        """There is progress to tell."""
        self._news = True
        self._wake.set()

    async def run(self) -> None:
        """Talks until the launcher has heard the last phase."""
        await keep_talking(self._converse)

    async def finish(self, timeout_s: float, talking: asyncio.Task[None]) -> bool:
        """Waits until the launcher has heard everything, at most `timeout_s`; whether it has."""
        self._finished = True
        self._wake.set()
        await asyncio.wait([talking], timeout=timeout_s)
        return talking.done()

    async def _converse(self) -> bool:
        async with self._link.connect() as channel:
            session: Any = AgentServiceStub(channel).Session
            call = session()
            listening = asyncio.ensure_future(self._listen(call))
            try:
                async for message in self._messages(listening):
                    await call.write(message)
                if listening.done():
                    await listening  # raises what broke the stream
                    return False
                await call.done_writing()
                await listening
                return bool((await call.code()) is grpc.StatusCode.OK)
            finally:
                listening.cancel()
                call.cancel()

    async def _messages(self, listening: asyncio.Future[None]) -> AsyncIterator[launcher_pb2.AgentMessage]:
        """Everything there is to say, as it comes up; ends with the session, or when nobody listens any more."""
        listening.add_done_callback(lambda _: self._wake.set())
        loop = asyncio.get_running_loop()
        next_line = 0
        next_beat = loop.time()
        self._phase_is_news = self._phase.phase != "starting"
        yield Message(hello=self._hello())
        while not listening.done():
            self._wake.clear()
            async for lines in self._lines(next_line):
                next_line = lines.lines.lines[-1].seq + 1
                yield lines
            while self._notes:
                yield Message(note=self._notes[0])
                self._notes.pop(0)
            while self._replies:
                yield Message(stacks=self._replies.pop(0))
            if loop.time() >= next_beat:
                next_beat = loop.time() + self._heartbeat_s * random.uniform(0.8, 1.0)
                self._news = False
                yield Message(heartbeat=self.heartbeat())
            if self._phase_is_news:
                self._phase_is_news = False
                yield Message(phase=self._phase)
            if self._news:
                next_beat = min(next_beat, loop.time() + NEWS_S)
            if self._finished and not (self._wake.is_set() or self._notes):
                return
            await self._wait(next_beat - loop.time())

    async def _wait(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()
        except TimeoutError:
            return

    async def _lines(self, next_line: int) -> AsyncIterator[launcher_pb2.AgentMessage]:
        live = self._journal.live
        while live and live[-1].seq >= next_line:
            fresh = islice((line for line in live if line.seq >= next_line), LINES_PER_MESSAGE)
            message = Message(lines=Message.Lines(lines=fresh))
            next_line = message.lines.lines[-1].seq + 1
            yield message

    def _hello(self) -> launcher_pb2.AgentMessage.Hello:
        pid = os.getpid()
        return Message.Hello(
            attempt_id=self._plan.attempt_id,
            fence=self._plan.fence,
            node=self._plan.node,
            pid=pid,
            start_time=native.start_time(pid),
            boot_id=native.boot_id(),
            phase=self._phase.phase,
        )

    async def _listen(self, call: Any) -> None:
        async for command in call:
            match command.WhichOneof("command"):
                case "welcome":
                    self._heartbeat_s = command.welcome.heartbeat_s or HEARTBEAT_S
                case "token":
                    self._link.renew(command.token.token)
                case "stop":
                    self.on_stop(command.stop)
                case "stacks":
                    self._answer(command.stacks.request_id)

    def _answer(self, request_id: int) -> None:
        # Taking stacks takes a while; the next command must not wait for it.
        task = asyncio.ensure_future(self._reply(request_id))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reply(self, request_id: int) -> None:
        self._replies.append(Message.StacksReply(request_id=request_id, ranks=await self.take_stacks()))
        self._wake.set()


async def _no_stacks() -> list[launcher_pb2.RankStacks]:
    return []
