"""What an agent talks to: real metrics and artifact services, and the launcher's end of the session, under a test's
control.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import json_format
from prometheus_client import CollectorRegistry
from servicekit import server as servers
from servicekit.auth import AttemptTokens, Authenticator, bearer_token
from trainyard.channel import connect
from trainyard_artifacts.app import Artifacts
from trainyard_launcher.plan import grants_of
from trainyard_metrics.app import Metrics
from trainyard_protos.v1 import artifacts_pb2_grpc, common_pb2, launcher_pb2, launcher_pb2_grpc, metrics_pb2_grpc

from scripts.testbed.patience import PATIENCE_S
from scripts.testbed.ports import free_port

Message = launcher_pb2.AgentMessage
Command = launcher_pb2.AgentCommand


class LauncherEnd(launcher_pb2_grpc.AgentServiceServicer):
    """Keeps what agents say, and tells them what a test wants to tell."""

    def __init__(self) -> None:
        self.heard: list[Message] = []
        self.sessions = 0
        self._commands: asyncio.Queue[Command] = asyncio.Queue()
        self._changed = asyncio.Condition()

    async def Session(self, request_iterator: AsyncIterator[Message], context: Any) -> AsyncIterator[Command]:
        self.sessions += 1
        yield Command(welcome=Command.Welcome(heartbeat_s=0.2))
        reading = asyncio.ensure_future(self._read(request_iterator))
        while not reading.done():
            command = asyncio.ensure_future(self._commands.get())
            await asyncio.wait([command, reading], return_when=asyncio.FIRST_COMPLETED)
            if command.done():
                yield command.result()
            command.cancel()

    async def _read(self, messages: AsyncIterator[Message]) -> None:
        async for message in messages:
            async with self._changed:
                self.heard.append(message)
                self._changed.notify_all()

    def tell(self, command: Command) -> None:
        self._commands.put_nowait(command)

    async def wait_for(self, wanted: Callable[[Message], bool]) -> Message:
        """The first message a predicate likes, also one that was heard before."""
        async with asyncio.timeout(PATIENCE_S), self._changed:
            await self._changed.wait_for(lambda: any(map(wanted, self.heard)))
            return next(message for message in self.heard if wanted(message))

    async def wait_for_heartbeats(self, count: int) -> None:
        """So many more of them: the agent had time for whatever else it does."""
        async with asyncio.timeout(PATIENCE_S), self._changed:
            wanted = self._heartbeats() + count
            await self._changed.wait_for(lambda: self._heartbeats() >= wanted)

    def _heartbeats(self) -> int:
        return sum(message.HasField("heartbeat") for message in self.heard)

    async def wait_for_line(self, text: str) -> common_pb2.LogLine:
        """The first line of output that contains `text`."""
        message = await self.wait_for(lambda each: any(text in line.text for line in each.lines.lines))
        return next(line for line in message.lines.lines if text in line.text)

    def phases(self) -> list[str]:
        return [message.phase.phase for message in self.heard if message.HasField("phase")]

    def notes(self) -> list[str]:
        return [message.note.reason for message in self.heard if message.HasField("note")]


class Door(grpc.aio.ServerInterceptor):
    """Lets calls in, those that append records only while it is open; remembers which came."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.came: list[str] = []
        self._changed = asyncio.Condition()

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        method = details.method.rpartition("/")[2]
        async with self._changed:
            self.came.append(method)
            self._changed.notify_all()
        if method == "Append":
            await self.open.wait()
        return await continuation(details)

    async def wait_for(self, method: str) -> None:
        """Until such a call came."""
        async with asyncio.timeout(PATIENCE_S), self._changed:
            await self._changed.wait_for(lambda: method in self.came)


class Yard:
    """Services on a free port of loopback, which can go away and come back there."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.port = free_port()  # kept while it is away
        self.tokens = AttemptTokens.load_or_create(home)
        self.launcher = LauncherEnd()
        self.door = Door()

    async def start(self) -> None:
        home = self.home
        authenticator = Authenticator(bearer_token(home), self.tokens)
        self.server = servers.build(authenticator, CollectorRegistry(), [self.door])
        self.metrics = Metrics(home=home, database_url=f"sqlite:///{home}/metrics.db")
        self.artifacts = Artifacts(home=home, database_url=f"sqlite:///{home}/artifacts.db")
        self.metrics.register(self.server)
        self.artifacts.register(self.server)
        launcher_pb2_grpc.add_AgentServiceServicer_to_server(self.launcher, self.server)
        self.port = servers.listen(self.server, "127.0.0.1", self.port)
        await self.metrics.start()
        await self.artifacts.start()
        await self.server.start()

    async def stop(self) -> None:
        await self.server.stop(0)
        await self.metrics.stop()
        await self.artifacts.stop()

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    @asynccontextmanager
    async def channel(self) -> AsyncIterator[grpc.aio.Channel]:
        async with connect(self.endpoint, bearer_token(self.home)) as channel:
            yield channel

    @asynccontextmanager
    async def metrics_stub(self) -> AsyncIterator[Any]:
        async with self.channel() as channel:
            yield metrics_pb2_grpc.MetricsServiceStub(channel)

    @asynccontextmanager
    async def artifacts_stub(self) -> AsyncIterator[Any]:
        async with self.channel() as channel:
            yield artifacts_pb2_grpc.ArtifactServiceStub(channel)


class Attempt:
    """One node's folder and the agent that runs in it."""

    def __init__(self, yard: Yard, folder: Path, **plan: Any) -> None:
        self.yard = yard
        self.folder = folder
        folder.mkdir(parents=True)
        ids = {"job_id": str(uuid.uuid4()), "attempt_id": str(uuid.uuid4()), "fence": 1}
        self.plan = ids | {
            "workspace": "default",
            "job_name": "test",
            "runtime": "process",
            "workers_per_node": 1,
            "nodes": 1,
            "grace_s": 5.0,
            "finalize_timeout_s": PATIENCE_S,
            "endpoint": yard.endpoint,
            "state_dir": str(yard.home / "cache"),
            "spec_json": "{}",
        }
        self.plan |= plan
        if self.plan["command"][0] == "python-code":
            self.plan["command"] = [sys.executable, "-c", self.plan["command"][1]]
        grants = grants_of(json_format.ParseDict(self.plan, launcher_pb2.NodePlan(), ignore_unknown_fields=True))
        token, _ = yard.tokens.mint("default", self.job_id, self.id, self.plan["fence"], 600, grants)
        (folder / "plan.json").write_text(json.dumps(self.plan | {"token": token}))
        self.process: asyncio.subprocess.Process | None = None

    @property
    def id(self) -> str:
        return str(self.plan["attempt_id"])

    @property
    def job_id(self) -> str:
        return str(self.plan["job_id"])

    async def start(self, *wrapper: str) -> None:
        """Starts the agent, by a command that ends in its own if one is given."""
        environment = {**os.environ, "TRAINYARD_ATTEMPT_ID": self.id, "MALLOC_ARENA_MAX": "2"}
        self.process = await asyncio.create_subprocess_exec(
            *wrapper, sys.executable, "-m", "trainyard.agent", str(self.folder), env=environment
        )

    async def wait(self) -> int:
        assert self.process is not None
        async with asyncio.timeout(PATIENCE_S):
            return await self.process.wait()

    async def run(self) -> common_pb2.Exit:
        """Runs the agent to its end; the exit record it left."""
        await self.start()
        assert await self.wait() == 0, self.log()
        print(self.exit(), self.log())
        return self.exit()

    def exit(self) -> common_pb2.Exit:
        return common_pb2.Exit.FromString((self.folder / "exit.bin").read_bytes())

    def log(self) -> str:
        return (self.folder / "agent.log").read_text()

    def output(self, rank: int = 0) -> str:
        return (self.folder / "out" / f"rank-{rank}.log").read_text()

    async def stored_lines(self) -> list[common_pb2.LogLine]:
        """Lines of the workers, as metrics has them."""
        from trainyard_protos.v1 import metrics_pb2

        async with self.yard.metrics_stub() as stub:
            request = metrics_pb2.ReadLogsRequest(workspace="default", job_id=self.job_id)
            pages = [page async for page in stub.ReadLogs(request)]
        return [stored.line for page in pages for stored in page.lines if stored.line.stream == "output"]

    async def series(self, name: str) -> dict[int, float]:
        """A stored series, stitched: step -> value."""
        from trainyard_protos.v1 import metrics_pb2

        async with self.yard.metrics_stub() as stub:
            selector = metrics_pb2.SeriesSelector(workspace="default", job_id=self.job_id, names=[name])
            answer = await stub.QuerySeries(metrics_pb2.QuerySeriesRequest(selector=selector))
        assert len(answer.series) <= 1
        return {step: value for series in answer.series for step, value in zip(series.step, series.value, strict=True)}
