"""AgentService: one stream per agent, for everything about its node."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from servicekit.auth import AttemptTokens, Principal, current_principal
from servicekit.errors import InvalidArgument, NotFound, PermissionDenied, Unavailable
from servicekit.grants import Grants
from servicekit.ids import now_ns
from trainyard_protos.v1 import launcher_pb2, launcher_pb2_grpc

from trainyard_launcher.attempts import Attempt, Node, Phase
from trainyard_launcher.backend import Backend, JoinLater, JoinRefused
from trainyard_launcher.plan import grants_of
from trainyard_launcher.ring import Ring
from trainyard_launcher.settings import Settings
from trainyard_launcher.stacks import StacksDesk
from trainyard_launcher.supervisor import Supervisor, stop_command

logger = logging.getLogger(__name__)

Message = launcher_pb2.AgentMessage
Command = launcher_pb2.AgentCommand
_MAX_COMMANDS = 64  # an agent that does not read that many is not well: its stream is ended


class AgentSession:
    """What waits to be sent to one agent.

    Args:
        grants: what the token says that opened the session; the ones that replace it say the same.
    """

    def __init__(self, grants: Grants | None = None) -> None:
        self.grants = grants
        self._commands: asyncio.Queue[Command | None] = asyncio.Queue(_MAX_COMMANDS + 1)

    def send(self, command: Command) -> None:
        """Sends a command; one too many ends the stream, and the agent connects again."""
        self._put(command if self._commands.qsize() < _MAX_COMMANDS else None)

    def end(self) -> None:
        """Ends the stream after what was sent before."""
        self._put(None)

    def _put(self, command: Command | None) -> None:
        if not self._commands.full():
            self._commands.put_nowait(command)

    async def commands(self) -> AsyncIterator[Command]:
        """Commands until the end."""
        while (command := await self._commands.get()) is not None:
            yield command


class AgentServicer(launcher_pb2_grpc.AgentServiceServicer):
    """Serves agents."""

    def __init__(
        self, supervisor: Supervisor, backend: Backend, tokens: AttemptTokens, stacks: StacksDesk, settings: Settings
    ) -> None:
        self._supervisor = supervisor
        self._backend = backend
        self._tokens = tokens
        self._stacks = stacks
        self._settings = settings
        self._handlers: dict[str, Callable[[Attempt, Node, Message], None]] = {
            "heartbeat": self._heartbeat,
            "lines": self._lines,
            "phase": self._phase,
            "stacks": lambda attempt, node, message: self._stacks.answered(attempt, node, message.stacks),
            "note": lambda attempt, _node, message: supervisor.note(attempt, message.note.reason, message.note.text),
        }

    async def Session(
        self, request_iterator: AsyncIterator[Message], context: grpc.aio.ServicerContext[Message, Command]
    ) -> AsyncIterator[Command]:
        """Until the agent hangs up, or is told that it is not wanted."""
        principal = current_principal()
        hello = _checked_hello(await anext(aiter(request_iterator), Message()), principal)
        # Before that nothing is known to be stale: agents come back faster than a launcher finds what it left.
        await self._supervisor.opened.wait()
        attempt = self._supervisor.attempts.get(hello.attempt_id)
        if attempt is None or not 0 <= hello.node < attempt.facts.nodes:
            yield Command(stop=Command.Stop(reason="Stale"))
            return
        node = attempt.nodes[hello.node]
        session = AgentSession(principal.grants)
        if principal.expired:
            node.minted = 0  # whatever was sent meanwhile, it did not arrive
        self._welcome(attempt, node, session, hello)
        reader = asyncio.create_task(self._read(attempt, node, session, request_iterator))
        granting = asyncio.create_task(self._grant(attempt, node, session)) if principal.grants is None else None
        try:
            async for command in session.commands():
                yield command
        finally:
            reader.cancel()
            if granting is not None:
                granting.cancel()
            if node.session is session:
                node.session = None

    async def Join(
        self, request: launcher_pb2.JoinRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> launcher_pb2.JoinResponse:
        """What the agent in a pod has to do; see the proto. Who asks may be anybody: nothing waits for them."""
        if not self._supervisor.opened.is_set():
            raise Unavailable("the launcher still looks for what runs", reason="JoinLater", hint="ask again")
        attempt = self._supervisor.attempts.get(request.attempt_id)
        if attempt is None or not 0 <= request.node < attempt.facts.nodes:
            raise NotFound(f"attempt {request.attempt_id} has no node {request.node} here", reason="NotAssigned")
        try:
            joined = await self._backend.join(
                request.attempt_id,
                request.node,
                request.service_account_token,
                lambda: self._supervisor.claim_again(attempt),
            )
        except JoinRefused as error:
            raise PermissionDenied(str(error), reason="JoinRefused") from error
        except JoinLater as error:
            raise Unavailable(str(error), reason="JoinLater", hint="ask again") from error
        node = attempt.nodes[request.node]
        node.heard, node.minted = time.monotonic(), time.time()
        joined.plan.token, _ = self._mint(attempt, grants_of(joined.plan))
        return launcher_pb2.JoinResponse(plan=joined.plan, secrets=joined.secrets)

    def _mint(self, attempt: Attempt, grants: Grants | None) -> tuple[str, int]:
        facts = attempt.facts
        return self._tokens.mint(
            facts.workspace,
            facts.job_id,
            facts.attempt_id,
            facts.fence,
            self._settings.token_ttl_s,
            grants,
            database_id=facts.database_id,
        )

    async def _grant(self, attempt: Attempt, node: Node, session: AgentSession) -> None:
        """Renews a token that names no artifacts: the attempt began under an older version of the launcher."""
        try:
            launch = await self._supervisor.claim_again(attempt)
        except JoinRefused as error:
            logger.warning("token not renewed", extra={"attempt": attempt.facts.attempt_id, "why": str(error)})
            return
        session.grants = grants_of(launch.plans[node.index])
        self._renew(attempt, node, session)

    def _welcome(self, attempt: Attempt, node: Node, session: AgentSession, hello: Message.Hello) -> None:
        if isinstance(node.session, AgentSession):
            node.session.end()  # of a connection that broke without a word
        node.session = session
        session.send(Command(welcome=Command.Welcome(heartbeat_s=self._settings.heartbeat_s)))
        phase = _phase(hello.phase or "starting")
        if attempt.stops(max(phase, node.phase)):
            session.send(stop_command(attempt))
        self._hear(attempt, node)
        # How a node that is finishing fared comes with the phase that follows.
        self._supervisor.heard(attempt, node, min(phase, Phase.RUNNING))

    async def _read(
        self, attempt: Attempt, node: Node, session: AgentSession, messages: AsyncIterator[Message]
    ) -> None:
        try:
            async for message in messages:
                handler = self._handlers.get(message.WhichOneof("message") or "")
                if handler is not None:
                    handler(attempt, node, message)
        except (asyncio.CancelledError, grpc.RpcError):
            pass
        except Exception:
            logger.exception("message of an agent failed", extra={"attempt": attempt.facts.attempt_id})
        finally:
            session.end()

    def _hear(self, attempt: Attempt, node: Node) -> None:
        node.heard, node.heard_ns = time.monotonic(), now_ns()
        # Tokens end by this clock, which goes on while the machine sleeps, and may be set back.
        age_s = time.time() - node.minted
        if not isinstance(node.session, AgentSession) or 0 <= age_s < self._settings.token_ttl_s / 2:
            return
        self._renew(attempt, node, node.session)

    def _renew(self, attempt: Attempt, node: Node, session: AgentSession) -> None:
        node.minted = time.time()
        token, expires_ns = self._mint(attempt, session.grants)
        session.send(Command(token=Command.Token(token=token, expires_ns=expires_ns)))

    def _heartbeat(self, attempt: Attempt, node: Node, message: Message) -> None:
        self._hear(attempt, node)
        first, node.workers = not node.workers, tuple(message.heartbeat.workers)
        node.resident_peak = max(node.resident_peak, sum(each.usage.memory_bytes for each in node.workers))
        node.resumed_from, node.progressed = message.heartbeat.resumed_from, message.heartbeat.progressed
        progressed = message.heartbeat.HasField("progress") and attempt.note_progress(message.heartbeat.progress)
        if first or progressed:
            attempt.changed()

    def _lines(self, attempt: Attempt, node: Node, message: Message) -> None:
        if attempt.ring is None:
            attempt.ring = Ring(self._settings.ring_lines, self._settings.ring_bytes)
        if attempt.ring.append(line for line in message.lines.lines if line.node == node.index):
            attempt.changed()

    def _phase(self, attempt: Attempt, node: Node, message: Message) -> None:
        exit = message.phase.exit if message.phase.HasField("exit") else None
        self._supervisor.heard(attempt, node, _phase(message.phase.phase), exit)


def _checked_hello(message: Message, principal: Principal) -> Message.Hello:
    if message.WhichOneof("message") != "hello":
        raise InvalidArgument("a session begins with hello", reason="HelloExpected")
    hello = message.hello
    if principal.kind != "attempt":
        raise PermissionDenied(
            "only an attempt's token opens a session", reason="AttemptOnly", hint="agents find theirs in their plan"
        )
    if (principal.attempt_id, principal.fence) != (hello.attempt_id, hello.fence):
        raise PermissionDenied(
            f"this token is for attempt {principal.attempt_id}, not {hello.attempt_id}", reason="WrongAttempt"
        )
    return hello


def _phase(name: str) -> Phase:
    try:
        return Phase.named(name)
    except KeyError:
        allowed = ", ".join(phase.name.lower() for phase in Phase)
        raise InvalidArgument(f"'{name}' is no phase; allowed: {allowed}", reason="UnknownPhase") from None
