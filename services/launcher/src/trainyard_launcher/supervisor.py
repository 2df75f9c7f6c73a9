"""Takes attempts from the scheduler, has them started, keeps watch, and reports their end.

    Celery message -> launch -> claim -> plan -> backend.start -> agents connect (`heard`)
    stop message / failing peer / answer STALE -> stop: command to the agent, or its signal; killed when time is up
    backend: node is gone -> `ended` -> all nodes gone -> ENDED is reported -> accepted -> forgotten here
    a success with outputs: PUBLISHING is reported -> accepted -> the outputs are published -> ENDED is reported

An attempt ends here only through the backend's word that its nodes are gone, so nothing of it runs when ENDED is
reported.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

import grpc
from trainyard_protos.v1 import common_pb2, launcher_pb2, scheduler_pb2, scheduler_pb2_grpc

from trainyard_launcher.attempts import COMPLETED, PEER_FAILED, Attempt, Node, Phase
from trainyard_launcher.backend import Backend, Facts, JoinRefused, Launch, NodeEnd, StartError
from trainyard_launcher.background import Background
from trainyard_launcher.closing import Closing
from trainyard_launcher.plan import Planner
from trainyard_launcher.registry import Registry
from trainyard_launcher.reports import Answer, Report, Reporter
from trainyard_launcher.scheduler import Batches, backoff, is_away
from trainyard_launcher.secrets import SecretUnavailable
from trainyard_launcher.settings import Settings

logger = logging.getLogger(__name__)

_PHASES = {
    Phase.RUNNING: scheduler_pb2.ATTEMPT_PHASE_STARTED,
    Phase.FINISHING: scheduler_pb2.ATTEMPT_PHASE_FINISHING,
    Phase.ENDED: scheduler_pb2.ATTEMPT_PHASE_ENDED,
}
_PUBLISHING = scheduler_pb2.ATTEMPT_PHASE_PUBLISHING
_ENDED = scheduler_pb2.ATTEMPT_PHASE_ENDED
_SILENT_LOOKS = 20  # within the time that counts as silence
Command = launcher_pb2.AgentCommand


class Supervisor:
    """All attempts of this launcher. Lives on the loop's thread."""

    def __init__(
        self,
        *,
        stub: scheduler_pb2_grpc.AttemptServiceAsyncStub,
        backend: Backend,
        planner: Planner,
        closing: Closing,
        launcher_id: str,
        settings: Settings,
    ) -> None:
        self._stub = stub
        self._claims = Batches(self._claim_all)
        self._backend = backend
        self._planner = planner
        self._closing = closing
        self._launcher_id = launcher_id
        self._settings = settings
        self.attempts = Registry(settings.recent_attempts)
        self.opened = asyncio.Event()  # what an earlier life left is known
        self._starting: dict[str, asyncio.Task[None]] = {}
        self._being_closed: dict[str, asyncio.Task[None]] = {}
        self._background = Background()
        self._reporter = Reporter(stub, launcher_id, self._answered, settings.call_timeout_s, settings.max_notes)

    # Beginning and end of the launcher itself

    async def open(self) -> None:
        """Takes over what an earlier life of this launcher left."""
        for found in await self._backend.open(self):
            # When its token was made is not known: it counts as due for renewal at the agent's first word.
            attempt = Attempt(found.facts, time.monotonic(), minted=0)
            attempt.unstarted = tuple(found.unstarted)
            self.attempts.add(attempt)
            if found.remark is not None:
                self.note(attempt, *found.remark)
            if any(found.facts.kinds):
                self.placed(found.facts.attempt_id)
            for end in found.ends:
                self.ended(end)
        self.opened.set()
        self._background.run(self._listen_for_silence(), "silence")

    async def close(self) -> None:
        """Stops watching. What runs goes on."""
        for attempt in self.attempts:
            if attempt.timer is not None:
                attempt.timer.cancel()
        await self._background.close()
        await self._reporter.close()
        await self._backend.close()

    # Starting

    async def launch(self, attempt_id: str, fence: int) -> None:
        """Claims an attempt and starts it. Doubled and late calls do nothing.

        Raises:
            grpc.aio.AioRpcError: the scheduler refused the claim.
        """
        attempt = self.attempts.get(attempt_id)
        if attempt is not None and not attempt.unstarted:
            return
        running = self._starting.get(attempt_id)
        if running is None:
            running = self._background.run(self._launch(attempt_id, fence), f"launch {attempt_id}")
            self._starting[attempt_id] = running
            running.add_done_callback(lambda _: self._starting.pop(attempt_id, None))
        await asyncio.shield(running)

    async def _launch(self, attempt_id: str, fence: int) -> None:
        claim = await self._claim(attempt_id, fence)
        if claim.stale:
            logger.info("claim refused", extra={"attempt": attempt_id, "fence": fence, "why": claim.stale_reason})
            return
        if claim.assignment.stopping and self.attempts.get(attempt_id) is None:
            self._never_started(attempt_id, fence, "Stopped", "stopped before it was started")
            return
        try:
            await self._start(claim.assignment)
        except SecretUnavailable as error:
            self._never_started(attempt_id, fence, "SecretUnavailable", str(error))
        except StartError as error:
            self._never_started(attempt_id, fence, error.reason, str(error))
        except OSError as error:
            self._never_started(attempt_id, fence, "StartFailed", str(error))

    async def _claim(self, attempt_id: str, fence: int) -> scheduler_pb2.ClaimAttemptResponse:
        request = scheduler_pb2.ClaimAttemptRequest(attempt_id=attempt_id, fence=fence, launcher_id=self._launcher_id)
        for pause_s in backoff():
            try:
                return await self._claims.call(request)
            except grpc.aio.AioRpcError as error:
                if not is_away(error):
                    raise
            await asyncio.sleep(pause_s)
        raise AssertionError("backoff never ends")

    async def _claim_all(
        self, requests: Sequence[scheduler_pb2.ClaimAttemptRequest]
    ) -> Sequence[scheduler_pb2.ClaimAttemptsResponse.Result]:
        request = scheduler_pb2.ClaimAttemptsRequest(requests=requests)
        return (await self._stub.ClaimAttempts(request, timeout=self._settings.call_timeout_s)).results

    async def _start(self, assignment: scheduler_pb2.Assignment) -> None:
        launch = self._planner.launch(assignment)
        attempt = self.attempts.get(assignment.attempt_id)
        if attempt is None:
            attempt = Attempt(launch.facts, time.monotonic(), minted=time.time())
            self.attempts.add(attempt)
        note = await self._backend.start(launch)
        attempt.unstarted = ()
        if note:
            self._reporter.note(assignment.attempt_id, assignment.fence, "LimitsNotEnforced", note)

    async def claim_again(self, attempt: Attempt) -> Launch:
        """The launch of an attempt that runs already: for its agents that come when it is forgotten here.

        Raises:
            JoinRefused: the scheduler has no use for the attempt any more, or its secrets are gone.
        """
        claim = await self._claim(attempt.facts.attempt_id, attempt.facts.fence)
        if claim.stale:
            raise JoinRefused(f"the attempt is over: {claim.stale_reason}")
        try:
            return self._planner.launch(claim.assignment)
        except SecretUnavailable as error:
            raise JoinRefused(str(error)) from error

    def _never_started(self, attempt_id: str, fence: int, reason: str, message: str) -> None:
        """Reports the end of an attempt of which nothing ever ran here."""
        exit = common_pb2.Exit(reason=reason, message=message, acknowledged=True)
        attempt = self.attempts.get(attempt_id)
        if attempt is None:
            self._reporter.phase(attempt_id, fence, _ENDED, exit)
            return
        for node in attempt.nodes:
            attempt.advance(node.index, Phase.ENDED, exit)
        self._follow_up(attempt)

    def lost(self, assigned: scheduler_pb2.ListAssignedResponse.Assigned) -> None:
        """Reports the end of an attempt that ran, and of which nothing is left here. An agent of it may go on without
        its folder: the services take nothing more of it."""
        attempt_id, fence = assigned.attempt_id, assigned.fence
        message = "its launcher knows nothing of it: the yard was restored from a backup, or its folder was removed"
        self._reporter.phase(attempt_id, fence, _ENDED, common_pb2.Exit(reason="AgentLost", message=message))
        if attempt_id not in self._being_closed:
            facts = Facts(assigned.workspace, assigned.job_id, "", attempt_id, fence, 0, 0, 0)
            self._begin_closing(attempt_id, self._closing.close(facts, ()))

    # What agents say

    def heard(self, attempt: Attempt, node: Node, phase: Phase, exit: common_pb2.Exit | None = None) -> None:
        """A node's agent says how far it is. Its end counts when the backend confirms it."""
        if phase is Phase.ENDED:
            node.told = exit
            asyncio.get_running_loop().call_later(self._settings.stop_slack_s, self._kill_if_left, attempt, node)
            phase = Phase.FINISHING
        attempt.advance(node.index, phase, exit)
        self._follow_up(attempt)

    def _kill_if_left(self, attempt: Attempt, node: Node) -> None:
        if node.phase is not Phase.ENDED:
            self._kill(attempt, node)

    def note(self, attempt: Attempt, reason: str, text: str) -> None:
        """A remark of an agent for the job's events."""
        self._reporter.note(attempt.facts.attempt_id, attempt.facts.fence, reason, text)

    # What the backend says, and asks

    def remark(self, attempt_id: str, reason: str, text: str) -> None:
        """A remark of the backend for the job's events."""
        attempt = self.attempts.get(attempt_id)
        if attempt is not None:
            self.note(attempt, reason, text)

    def placed(self, attempt_id: str) -> None:
        """Tells the scheduler where nodes are, when the cluster chose; see `Observer`."""
        attempt = self.attempts.get(attempt_id)
        if attempt is None:
            return
        for node in attempt.nodes:
            if not node.heard_ns:
                node.heard = time.monotonic()
        if found := self._placements(attempt):
            self._reporter.placements(attempt_id, attempt.facts.fence, found)

    def _placements(self, attempt: Attempt) -> list[scheduler_pb2.Placement]:
        """The machines of nodes, when some are not those that were planned."""
        facts = attempt.facts
        found = {node.index: self._backend.place(facts.attempt_id, node.index).machine for node in attempt.nodes}
        known = {node: machine for node, machine in found.items() if machine}
        if all(tuple(facts.machines[node : node + 1]) == (machine,) for node, machine in known.items()):
            return []
        return [scheduler_pb2.Placement(node=node, machine=machine) for node, machine in known.items()]

    async def delivered(self, facts: Facts) -> None:
        """Metrics lacks nothing of an attempt that is over any more; see `Observer`."""
        await self._closing.change(facts)

    async def delivery_token(self, facts: Facts, undelivered: Sequence[str]) -> str:
        """With which metrics takes what an attempt that is over left; see `Observer`."""
        return await self._closing.delivery_token(facts, undelivered)

    def silent_s(self, attempt_id: str, node: int) -> float:
        """For how long a node's agent has said nothing, or was waited for; infinity when the attempt is not known."""
        attempt = self.attempts.get(attempt_id)
        if attempt is None:
            return math.inf
        return time.monotonic() - attempt.nodes[node].heard

    def ended(self, end: NodeEnd) -> None:
        """A node is over and nothing of it runs any more."""
        attempt = self.attempts.get(end.attempt_id)
        if attempt is None or attempt.nodes[end.node].phase is Phase.ENDED:
            return
        if end.exit is not None:
            exit = attempt.with_memory(end.exit, end)
            self._tell_what_is_lost(attempt, end.node, end.exit)
            self._node_over(attempt, end.node, attempt.explained(end.node, exit, end.cause, presumed=end.presumed))
        else:
            self._background.run(self._ended_without_record(attempt, end), f"end {end.attempt_id}")

    async def _ended_without_record(self, attempt: Attempt, end: NodeEnd) -> None:
        lines = await self._backend.logs(end.attempt_id, end.node)
        exit = attempt.exit_without_record(end, lines)
        self._tell_what_is_lost(attempt, end.node, None)
        self._node_over(attempt, end.node, exit)

    def _tell_what_is_lost(self, attempt: Attempt, index: int, record: common_pb2.Exit | None) -> None:
        """Says which records of a node there are not in metrics and nowhere else.

        Args:
            record: how the node's agent says that it ended.
        """
        if self._backend.keeps_records:
            return
        if record is None and attempt.nodes[index].heard_ns:
            what = "lines and rows that its agent had not delivered, which died without a word, are lost"
        elif record is not None and (record.unacknowledged_lines or record.unacknowledged_rows):
            lines, rows = record.unacknowledged_lines, record.unacknowledged_rows
            what = f"{lines:,} lines and {rows:,} rows are lost: metrics did not take them in time"
        else:
            return
        self.note(attempt, "RecordsLost", f"node {index}: {what}")

    def _node_over(self, attempt: Attempt, index: int, exit: common_pb2.Exit) -> None:
        attempt.advance(index, Phase.ENDED, exit)
        self._follow_up(attempt)

    def _follow_up(self, attempt: Attempt) -> None:
        """After any news of a node: peers of a failed one are stopped, and what all nodes have reached is reported."""
        if attempt.first_failure is not None and not attempt.stop_reason and not attempt.over:
            self.stop_attempt(attempt, PEER_FAILED)
        facts = attempt.facts
        for phase in attempt.due():
            exit = attempt.verdict() if phase >= Phase.FINISHING else None
            if phase is Phase.ENDED and exit is not None and _succeeded(exit) and facts.outputs:
                self._reporter.phase(facts.attempt_id, facts.fence, _PUBLISHING, exit)
            placements = self._placements(attempt) if phase is Phase.RUNNING else []
            self._reporter.phase(facts.attempt_id, facts.fence, _PHASES[phase], exit, placements)
        if attempt.over and attempt.timer is not None:
            attempt.timer.cancel()
        attempt.changed()

    # Stopping

    async def stop(self, attempt_id: str, fence: int) -> None:
        """The scheduler wants an attempt stopped."""
        if (starting := self._starting.get(attempt_id)) is not None:
            await asyncio.wait({starting})
        attempt = self.attempts.get(attempt_id)
        if attempt is None:
            self._never_started(attempt_id, fence, "Stopped", "nothing of it runs here")
        elif attempt.facts.fence == fence:
            self.stop_attempt(attempt, "DeadlineExceeded" if attempt.past_deadline else "Cancelled")

    def stop_attempt(self, attempt: Attempt, reason: str) -> None:
        """Asks all nodes to end, after a peer's failure those whose workers may still run; what is left when their time
        is up is killed.

        Args:
            reason: as in `AgentCommand.Stop`. A wish of the scheduler replaces that of a failed peer.
        """
        if attempt.over or attempt.stop_reason not in ("", PEER_FAILED) or attempt.stop_reason == reason:
            return
        attempt.stop_reason = reason
        for node in attempt.nodes:
            if node.phase is not Phase.ENDED and attempt.stops(node.phase):
                self._background.run(self._stop_node(attempt, node), f"stop {attempt.facts.attempt_id}")
        if attempt.timer is None:
            allowed_s = attempt.facts.grace_s + self._settings.finalize_timeout_s + self._settings.stop_slack_s
            attempt.timer = asyncio.get_running_loop().call_later(allowed_s, self._kill_all, attempt)

    async def _stop_node(self, attempt: Attempt, node: Node) -> None:
        if node.session is not None:
            node.session.send(stop_command(attempt))
        else:
            await self._backend.stop(attempt.facts.attempt_id, node.index, kill=False)

    def _kill_all(self, attempt: Attempt) -> None:
        for node in attempt.nodes:
            self._kill_if_left(attempt, node)

    def _kill(self, attempt: Attempt, node: Node) -> None:
        attempt_id = attempt.facts.attempt_id
        self._background.run(self._backend.stop(attempt_id, node.index, kill=True), f"kill {attempt_id}")

    def disown(self, attempt: Attempt) -> None:
        """The scheduler has no use for an attempt: ends what is left of it at once."""
        attempt.stop_reason = "Stale"
        self._kill_all(attempt)

    # What the scheduler answers

    async def _answered(self, report: Report, answer: Answer) -> None:
        attempt = self.attempts.get(report.attempt_id)
        if attempt is None:
            return
        if report.phase == _ENDED:
            self._settle(attempt)
        elif report.phase == _PUBLISHING:
            if not answer.stale and not answer.stop:
                await self._closing.publish(attempt.facts)  # before the end is reported, and so seen
        elif answer.stale:
            self.disown(attempt)
        elif answer.stop:
            await self.stop(report.attempt_id, report.fence)

    async def settle(self, attempt_ids: Iterable[str]) -> None:
        """Lets go of attempts that the scheduler has forgotten, also before the answer to the report of their end has
        come back. What they stored is removed: they need not be closed."""
        for attempt_id in attempt_ids:
            attempt = self.attempts.get(attempt_id)
            if attempt is not None and attempt.over:
                self.attempts.remove(attempt)
            elif (closing := self._being_closed.get(attempt_id)) is not None:
                closing.cancel()
                await asyncio.wait([closing])
            else:
                continue
            await self._backend.settle(attempt_id)

    def _settle(self, attempt: Attempt) -> None:
        """Lets go of an attempt whose end the scheduler knows, once every service knows it as well. A launcher that
        ends before that finds the attempt again, and reports its end again."""
        attempt_id = attempt.facts.attempt_id
        self.attempts.remove(attempt)
        self._begin_closing(attempt_id, self._close(attempt.facts))

    def _begin_closing(self, attempt_id: str, work: Coroutine[Any, Any, None]) -> None:
        task = self._background.run(work, f"close {attempt_id}")
        self._being_closed[attempt_id] = task
        task.add_done_callback(lambda _: self._being_closed.pop(attempt_id, None))

    async def _close(self, facts: Facts) -> None:
        await self._closing.close(facts, await self._backend.undelivered(facts.attempt_id))
        await self._backend.settle(facts.attempt_id)

    # Silence

    async def _listen_for_silence(self) -> None:
        look_s = self._settings.silence_s / _SILENT_LOOKS
        while True:
            before = time.monotonic()
            await asyncio.sleep(look_s)
            now = time.monotonic()
            if (late_s := now - before - look_s) > look_s:
                self._stood_still(late_s, now)
            for attempt in self.attempts:
                waits = self._backend.awaits_machines(attempt.facts.attempt_id)
                for node in attempt.nodes:
                    if waits and not node.heard_ns:
                        node.heard = now
                    elif node.phase is not Phase.ENDED and node.forced is None and not attempt.unstarted:
                        self._end_if_silent(attempt, node, now)

    def _stood_still(self, for_s: float, now: float) -> None:
        """In time in which this process did not run, for instance because the whole machine stood still, it could hear
        nobody: that is nobody's silence."""
        for attempt in self.attempts:
            for node in attempt.nodes:
                node.heard = min(now, node.heard + for_s)

    def _end_if_silent(self, attempt: Attempt, node: Node, now: float) -> None:
        limit_s = self._settings.silence_s if node.heard_ns else self._settings.connect_s
        if now - node.heard < limit_s:
            return
        place = self._backend.place(attempt.facts.attempt_id, node.index)
        if place.reason and not node.heard_ns:
            reason, message = place.reason, f"{place.message} (so for {limit_s:.0f} s)"
        else:
            reason = "AgentSilent"
            message = f"the agent of node {node.index} said nothing for {limit_s:.0f} s, though its process was there"
        node.forced = common_pb2.Exit(reason=reason, message=message, node=node.index)
        self._kill(attempt, node)


def stop_command(attempt: Attempt) -> Command:
    """What an agent is told when its attempt is to end."""
    return Command(stop=Command.Stop(grace_s=attempt.facts.grace_s, reason=attempt.stop_reason))


def _succeeded(exit: common_pb2.Exit) -> bool:
    """Whether an attempt that nobody has stopped succeeded with this exit."""
    return exit.reason == COMPLETED and exit.acknowledged
