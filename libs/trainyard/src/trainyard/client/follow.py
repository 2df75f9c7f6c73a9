"""Live output joined with stored output, so that a reader sees every line once.

The launcher keeps recent lines in memory and numbers them per attempt and node; metrics keeps all of them under the
same numbers. Lines that are no longer in the launcher's memory (a late or slow reader, a restarted launcher) are read
from metrics; lines that come twice are skipped.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from trainyard_protos.v1 import common_pb2, launcher_pb2

from trainyard import errors
from trainyard.client import states
from trainyard.client.connection import Outage
from trainyard.client.runs import RunCalls, Subject

Event = launcher_pb2.FollowEvent


@dataclass(slots=True)
class Position:
    """The attempt that is read, and per node the first line not yet seen."""

    attempt: int = 0
    next_seq: dict[int, int] = field(default_factory=dict)

    def begin(self, attempt: int) -> bool:
        """Turns to an attempt; false when it is the one that is read already."""
        if attempt == self.attempt:
            return False
        self.attempt, self.next_seq = attempt, {}
        return True


class FollowCalls(RunCalls):
    """Following a job to its end."""

    async def follow(self, job: str, position: Position | None = None) -> AsyncIterator[Event]:
        """What a job does, from `position` (default: the oldest line of its current attempt) until it has ended.

        A `dropped` event stands for lines that are nowhere any more; all other gaps are filled. A yard that is killed
        and started again is waited for.
        """
        position = position or Position()
        job = await self.job_id(job)
        outage = Outage()
        while True:
            try:
                async for event in self.live(job, next_seq=position.next_seq):
                    outage.over()
                    async for complete in self._complete(job, event, position):
                        yield complete
                if (await self.get(job)).state in states.ENDED:
                    return
            except errors.NotRunning as lost:
                await self._connection.until_back(lost, outage)

    async def _complete(self, job: str, event: Event, position: Position) -> AsyncIterator[Event]:
        match event.WhichOneof("event"):
            case "lines":
                for line in event.lines.lines:
                    async for each in self._in_order(job, line, position):
                        yield each
            case "dropped":
                async for each in self._stored(job, event.dropped, position):
                    yield each
            case "started":
                if position.begin(event.started.number):
                    yield event
            case _:
                yield event

    async def _in_order(self, job: str, line: common_pb2.LogLine, position: Position) -> AsyncIterator[Event]:
        expected = position.next_seq.get(line.node, 0)
        if line.seq < expected:
            return
        if line.seq > expected:
            gap = Event.Dropped(node=line.node, from_seq=expected, to_seq=line.seq)
            async for event in self._stored(job, gap, position):
                yield event
        position.next_seq[line.node] = line.seq + 1
        yield Event(lines=Event.Lines(lines=[line]))

    async def _stored(self, job: str, gap: Event.Dropped, position: Position) -> AsyncIterator[Event]:
        """Lines of a gap as metrics has them, then a mark for those that it lacks too."""
        expected = max(gap.from_seq, position.next_seq.get(gap.node, 0))
        async for stored in self.logs(Subject(job_id=job), attempt=position.attempt):
            line = stored.line
            if line.node == gap.node and expected <= line.seq < gap.to_seq:
                expected = line.seq + 1
                yield Event(lines=Event.Lines(lines=[line]))
        if expected < gap.to_seq:
            yield Event(dropped=Event.Dropped(node=gap.node, from_seq=expected, to_seq=gap.to_seq))
        position.next_seq[gap.node] = max(position.next_seq.get(gap.node, 0), gap.to_seq)
