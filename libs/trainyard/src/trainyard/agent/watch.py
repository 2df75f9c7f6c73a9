"""Watches running workers: their output, their numbers, what they use."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

from trainyard_protos.v1 import launcher_pb2

from trainyard.agent.carriers import Carriers
from trainyard.agent.contract import output_file
from trainyard.agent.gang import Gang
from trainyard.agent.gpu import Gpus
from trainyard.agent.hang import Pulse
from trainyard.agent.output import Output
from trainyard.agent.parts import MEASURING, READING_OUTPUT, READING_TRACKERS
from trainyard.agent.plan import Plan
from trainyard.agent.sampler import Sampler, Target, points_of

# Shared memory raises no event when a tracker writes to it.
LOOK_S = 0.5
SAMPLE_S = 5.0


class Watch:
    """From the workers' start to their end."""

    def __init__(self, folder: Path, plan: Plan, carriers: Carriers, pulse: Pulse) -> None:
        self._folder = folder
        self._plan = plan
        self._carriers = carriers
        self._pulse = pulse
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self, gang: Gang) -> None:
        """Starts watching."""
        self._gang = gang
        self._sampler = Sampler(self._targets(gang), self._gpus())
        files = {each.worker.rank: Path(output_file(str(self._folder), each.worker.rank)) for each in gang.started}
        self._output = Output(files, self._carriers.output)
        self._carriers.session.heartbeat = self._heartbeat
        self._carriers.session.news()
        self._pulse.beat()
        run = self._carriers.parts.run
        self._tasks = [
            run(READING_OUTPUT, partial(self._output.follow, self._carriers.changes)),
            run(READING_TRACKERS, self._look),
            run(MEASURING, self._sample),
        ]

    @property
    def resident_peak(self) -> int:
        """The most resident memory of all workers together that a sample has seen, in bytes."""
        return self._sampler.peak_bytes

    async def end(self) -> None:
        """Takes in the last of everything; the workers have ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._tasks:
            with self._carriers.parts.guard(READING_OUTPUT):
                await self._output.drain()
            with self._carriers.parts.guard(READING_TRACKERS):
                self._carriers.look_at_trackers()
            if lost := self._carriers.journal.lost:
                self._carriers.note(
                    "LinesLost",
                    f"the disk of this machine was full: metrics does not get the last {lost:,} lines; the files in "
                    f"{self._folder / 'out'} have them",
                )

    def _targets(self, gang: Gang) -> list[Target]:
        share = self._plan.gpus_per_worker or (len(self._plan.gpus) // max(1, len(gang.started)))
        return [
            Target(
                each.worker.rank,
                each.pid,
                tuple(self._plan.gpus[each.worker.local_rank * share : (each.worker.local_rank + 1) * share]),
            )
            for each in gang.started
        ]

    def _gpus(self) -> Gpus:
        try:
            return Gpus(self._plan.gpus)
        except OSError as error:
            self._carriers.note("GpuNotMeasured", str(error))
            return Gpus(())

    async def _look(self) -> None:
        while True:
            self._carriers.look_at_trackers()
            await asyncio.sleep(LOOK_S)

    async def _sample(self) -> None:
        while True:
            for rank, usage in self._sampler.sample().items():
                self._carriers.sample(rank, points_of(usage))
            await asyncio.sleep(SAMPLE_S)

    def _heartbeat(self) -> launcher_pb2.AgentMessage.Heartbeat:
        beat = launcher_pb2.AgentMessage.Heartbeat(
            resumed_from=self._carriers.restored.version_id, progressed=self._carriers.progressed
        )
        if self._carriers.tracked.progress.updated_ns:
            beat.progress.CopyFrom(self._carriers.tracked.progress)
        for each in self._gang.started:
            end = self._gang.ends.get(each.worker.rank)
            status = beat.workers.add(rank=each.worker.rank, pid=each.pid, state="exited" if end else "running")
            if end is not None and end.exit_code is not None:
                status.exit_code = end.exit_code
            if (usage := self._sampler.newest.get(each.worker.rank)) is not None:
                status.usage.CopyFrom(usage)
        return beat
