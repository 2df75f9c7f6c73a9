"""LauncherService: what users ask about running jobs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from servicekit.auth import require_user, require_workspace
from servicekit.errors import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted
from servicekit.events import caller
from trainyard_protos.v1 import launcher_pb2, launcher_pb2_grpc
from trainyard_protos.v1.admin_pb2 import GetUsageRequest, GetUsageResponse

from trainyard_launcher import backend
from trainyard_launcher.attempts import Attempt, Node, Phase
from trainyard_launcher.follow import JobFollower, follow_attempt
from trainyard_launcher.registry import Registry
from trainyard_launcher.settings import Settings
from trainyard_launcher.stacks import StacksDesk

Input = launcher_pb2.ShellInput
Output = launcher_pb2.ShellOutput
Context = grpc.aio.ServicerContext[Any, Any]


class LauncherServicer(launcher_pb2_grpc.LauncherServiceServicer):
    """Serves users; attempts may not call it.

    Args:
        note: adds an event to a job: attempt, reason, text.
    """

    def __init__(
        self,
        attempts: Registry,
        nodes: backend.Backend,
        follower: JobFollower,
        stacks: StacksDesk,
        note: Callable[[Attempt, str, str], None],
        settings: Settings,
    ) -> None:
        self._note = note
        self._attempts = attempts
        self._backend = nodes
        self._follower = follower
        self._stacks = stacks
        self._max_followers = settings.max_followers
        self._patience_s = settings.call_timeout_s
        self._followers = 0

    async def Follow(
        self, request: launcher_pb2.FollowRequest, context: Context
    ) -> AsyncIterator[launcher_pb2.FollowEvent]:
        """Live output; see the proto."""
        workspace = _admit(request.workspace)
        if self._followers >= self._max_followers:
            raise ResourceExhausted(
                f"{self._max_followers} followers are served already",
                reason="TooManyFollowers",
                hint="read stored output with: yard logs JOB",
            )
        if request.attempt:
            events = follow_attempt(self._of_number(workspace, request), request.next_seq)
        else:
            events = self._follower.follow(workspace, request.job_id, request.next_seq)
        self._followers += 1
        try:
            async for event in events:
                yield event
        finally:
            self._followers -= 1

    def _of_number(self, workspace: str, request: launcher_pb2.FollowRequest) -> Attempt:
        attempt = self._attempts.of_job(request.job_id, request.attempt)
        if attempt is not None and attempt.facts.workspace != workspace:
            raise _not_in(workspace, request.job_id)
        if attempt is None:
            raise FailedPrecondition(
                f"attempt {request.attempt} of job {request.job_id} is not in memory",
                reason="NotRunning",
                hint=f"read its stored output with: yard logs {request.job_id} --attempt {request.attempt}",
            )
        return attempt

    async def Describe(self, request: launcher_pb2.DescribeRequest, context: Context) -> launcher_pb2.DescribeResponse:
        """Each node and worker, now."""
        attempt = self._running(request.workspace, request.job_id)
        nodes = [self._status(attempt, node) for node in attempt.nodes]
        return launcher_pb2.DescribeResponse(nodes=nodes, progress=attempt.progress)

    def _status(self, attempt: Attempt, node: Node) -> launcher_pb2.NodeStatus:
        place = self._backend.place(attempt.facts.attempt_id, node.index)
        return launcher_pb2.NodeStatus(
            node=node.index,
            machine=place.machine,
            phase="lost" if node.forced is not None else node.phase.name.lower(),
            heard_ns=node.heard_ns,
            workers=node.workers,
            folder=place.folder,
            gpus=place.gpus,
            reason="" if node.heard_ns else place.reason,
            message="" if node.heard_ns else place.message,
        )

    async def GetUsage(self, request: GetUsageRequest, context: Context) -> GetUsageResponse:
        """What attempts take on disk."""
        require_user()
        return await self._backend.usage(request.job_ids)

    async def Stacks(self, request: launcher_pb2.StacksRequest, context: Context) -> launcher_pb2.StacksResponse:
        """Python stacks of every rank, now."""
        attempt = self._running(request.workspace, request.job_id)
        return launcher_pb2.StacksResponse(ranks=await self._stacks.take(attempt))

    async def Shell(self, request_iterator: AsyncIterator[Input], context: Context) -> AsyncIterator[Output]:
        """An interactive shell beside a worker; it ends with the stream."""
        first = await anext(aiter(request_iterator), Input())
        if first.WhichOneof("input") != "open":
            raise InvalidArgument("a shell begins with open", reason="OpenExpected")
        shell = await self._open_shell(first.open, caller(context))
        reader = asyncio.create_task(_feed(shell, request_iterator))
        try:
            async for data in shell.output():
                yield Output(data=data)
            yield Output(exit_code=await shell.wait())
        finally:
            reader.cancel()
            await shell.close()

    async def _open_shell(self, wanted: Input.Open, actor: str) -> backend.Shell:
        attempt = self._running(wanted.workspace, wanted.job_id)
        per_node = attempt.facts.workers_per_node
        ranks = attempt.facts.nodes * per_node
        if not 0 <= wanted.rank < ranks:
            raise InvalidArgument(
                f"the job has no rank {wanted.rank}", reason="NoSuchRank", hint=f"its ranks are 0 to {ranks - 1}"
            )
        node = attempt.nodes[wanted.rank // per_node]
        await self._workers_known(attempt, node)
        pids = {worker.rank: worker.pid for worker in node.workers if worker.state == "running"}
        request = backend.ShellRequest(
            command=tuple(wanted.command),
            worker_pid=pids.get(wanted.rank, 0),
            tty=wanted.tty,
            rows=wanted.rows or 24,
            columns=wanted.columns or 80,
        )
        # Before it opens: no command runs in the job's place without a trace.
        self._note(attempt, "ShellOpened", f"{actor} opens a shell beside rank {wanted.rank}")
        try:
            return await self._backend.shell(attempt.facts.attempt_id, node.index, request)
        except backend.StartError as error:
            raise FailedPrecondition(str(error), reason="ShellFailed") from error

    async def _workers_known(self, attempt: Attempt, node: Node) -> None:
        """Returns once a running node's agent has said who its workers are, which it does soon after they run."""
        event = attempt.watch()
        try:
            async with asyncio.timeout(self._patience_s):
                while node.phase is Phase.RUNNING and not node.workers:
                    event.clear()
                    await event.wait()
        except TimeoutError:
            pass  # then it is a shell with the node's surroundings
        finally:
            attempt.unwatch(event)

    def _running(self, workspace: str, job_id: str) -> Attempt:
        wanted = _admit(workspace)
        attempt = self._attempts.running(job_id)
        if attempt.facts.workspace != wanted:
            raise _not_in(wanted, job_id)
        return attempt


def _not_in(workspace: str, job_id: str) -> NotFound:
    return NotFound(
        f"workspace '{workspace}' has no job {job_id}", reason="JobNotFound", hint="see what there is with: yard jobs"
    )


def _admit(workspace: str) -> str:
    require_user()
    return require_workspace(workspace)


async def _feed(shell: backend.Shell, inputs: AsyncIterator[Input]) -> None:
    """Hands a user's input to the shell."""
    async for message in inputs:
        kind = message.WhichOneof("input")
        if kind == "stdin":
            await shell.write(message.stdin)
        elif kind == "resize":
            shell.resize(message.resize.rows, message.resize.columns)
        elif kind == "close_stdin":
            await shell.close_stdin()
