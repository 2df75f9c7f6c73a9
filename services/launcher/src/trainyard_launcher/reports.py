"""Tells the scheduler what happened, in order per attempt, until it has heard.

One sender per attempt, only while it has something to tell. What waits is bounded: an attempt has four phases, and
notes beyond a limit are dropped.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

import grpc
from servicekit.ids import now_ns
from trainyard_protos.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc

from trainyard_launcher.background import Background
from trainyard_launcher.scheduler import Batches, backoff, is_away

logger = logging.getLogger(__name__)

_TEXT_MAX = 4096
_TEXTS_MAX = 20

Report = scheduler_pb2.ReportAttemptRequest
Answer = scheduler_pb2.ReportAttemptResponse
Answered = Callable[[Report, Answer], Awaitable[None]]


class Reporter:
    """Sends reports.

    Args:
        stub: the scheduler.
        launcher_id: who reports.
        answered: awaited with each answer, before the next report of the same attempt.
        call_timeout_s: deadline of one call.
        max_notes: how many notes of one attempt may wait.
    """

    def __init__(
        self,
        stub: scheduler_pb2_grpc.AttemptServiceAsyncStub,
        launcher_id: str,
        answered: Answered,
        call_timeout_s: float,
        max_notes: int,
    ) -> None:
        self._stub = stub
        self._launcher_id = launcher_id
        self._answered = answered
        self._call_timeout_s = call_timeout_s
        self._max_notes = max_notes
        self._calls = Batches(self._report_all)
        self._waiting: dict[str, deque[Report]] = {}
        self._background = Background()

    def phase(
        self,
        attempt_id: str,
        fence: int,
        phase: scheduler_pb2.AttemptPhase.ValueType,
        exit: common_pb2.Exit | None = None,
        placements: Sequence[scheduler_pb2.Placement] = (),
    ) -> None:
        """Reports that an attempt is so far, and where its nodes are when that was not planned."""
        bounded = None if exit is None else _bounded(exit)
        self._send(Report(attempt_id=attempt_id, fence=fence, phase=phase, exit=bounded, placements=placements))

    def placements(self, attempt_id: str, fence: int, placements: Sequence[scheduler_pb2.Placement]) -> None:
        """Reports where an attempt's nodes are. One that waits to be sent is replaced."""
        report = Report(attempt_id=attempt_id, fence=fence, placements=placements)
        waiting = self._waiting.get(attempt_id)
        last = waiting[-1] if waiting and len(waiting) > 1 else None  # the first is on its way
        if waiting and last is not None and last.placements and not last.phase:
            waiting.pop()
        self._send(report)

    def note(self, attempt_id: str, fence: int, reason: str, text: str) -> None:
        """Adds a remark to the job's events; dropped when too many wait."""
        waiting = self._waiting.get(attempt_id, ())
        if sum(1 for report in waiting if report.note) >= self._max_notes:
            logger.warning("note dropped: too many wait", extra={"attempt": attempt_id, "reason": reason})
            return
        self._send(Report(attempt_id=attempt_id, fence=fence, note=text, note_reason=reason))

    def _send(self, report: Report) -> None:
        report.launcher_id = self._launcher_id
        report.time_ns = now_ns()
        waiting = self._waiting.get(report.attempt_id)
        if waiting is not None:
            waiting.append(report)
            return
        self._waiting[report.attempt_id] = deque([report])
        self._background.run(self._drain(report.attempt_id), f"report {report.attempt_id}")

    async def _drain(self, attempt_id: str) -> None:
        waiting = self._waiting[attempt_id]
        try:
            while waiting:
                answer = await self._deliver(waiting[0])
                report = waiting.popleft()
                if answer is not None:
                    await self._answered(report, answer)
        finally:
            del self._waiting[attempt_id]

    async def _deliver(self, report: Report) -> Answer | None:
        """The scheduler's answer; None when it refuses the report for good.

        An end is told in any case: an exit that is refused goes again without what its agent said.
        """
        answer = await self._offer(report)
        if answer is None and report.phase == scheduler_pb2.ATTEMPT_PHASE_ENDED:
            report.exit.CopyFrom(common_pb2.Exit(reason="AgentLost", message="the exit of its agent was refused"))
            answer = await self._offer(report)
        return answer

    async def _offer(self, report: Report) -> Answer | None:
        for pause_s in backoff():
            try:
                return await self._calls.call(report)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.NOT_FOUND:
                    return Answer(stale=True)
                if not is_away(error):
                    logger.error(
                        "report refused",
                        extra={"attempt": report.attempt_id, "code": str(error.code()), "why": error.details()},
                    )
                    return None
            await asyncio.sleep(pause_s)
        raise AssertionError("backoff never ends")

    async def _report_all(self, reports: Sequence[Report]) -> Sequence[scheduler_pb2.ReportAttemptsResponse.Result]:
        request = scheduler_pb2.ReportAttemptsRequest(requests=reports)
        return (await self._stub.ReportAttempts(request, timeout=self._call_timeout_s)).results

    async def close(self) -> None:
        """Gives up what was not delivered: the next life finds it on disk."""
        await self._background.close()


def _bounded(exit: common_pb2.Exit) -> common_pb2.Exit:
    """An exit that fits into a report, whatever its agent, or who wrote in its place, put into it."""
    kept = common_pb2.Exit()
    kept.CopyFrom(exit)
    for field in ("reason", "message", "signal", "resumed_from"):
        setattr(kept, field, getattr(exit, field)[:_TEXT_MAX])
    for field in ("last_lines", "unstored"):
        texts = getattr(kept, field)
        del texts[:]
        texts.extend(text[:_TEXT_MAX] for text in getattr(exit, field)[:_TEXTS_MAX])
    return kept
