"""The second stage: one node of an attempt, from running (or soon running) workers to its exit record."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

from trainyard_protos.v1 import common_pb2, launcher_pb2

from trainyard.agent import boot, first_failure, surroundings, verdict
from trainyard.agent.carriers import Carriers
from trainyard.agent.contract import workers_of
from trainyard.agent.echo import Echo
from trainyard.agent.exit_record import write_exit, write_termination
from trainyard.agent.failure import NodeFailed
from trainyard.agent.gang import Gang
from trainyard.agent.hang import Pulse
from trainyard.agent.node_memory import NodeMemory
from trainyard.agent.parts import TALKING
from trainyard.agent.plan import Plan
from trainyard.agent.prepare import Prepared, prepare
from trainyard.agent.processes import Reaper
from trainyard.agent.spawn import CannotStart, Started, start_all
from trainyard.agent.stacks import take_stacks
from trainyard.agent.verdict import StopOrder
from trainyard.agent.watch import Watch

STOP_PEERS_S = 10.0  # grace for the other workers when one failed
LOST_PEER_S = 3.0  # for the peer that a failed worker lost to end by itself, with its traceback and exit status
SAY_GOODBYE_S = 5.0
PEER_FAILED = "PeerFailed"


def supervise(folder: str, plan: Plan, started: list[Started], failure: CannotStart | None) -> int:
    """Runs the node to its end; the result is the agent's exit code."""
    return asyncio.run(_supervise(Path(folder), plan, started, failure))


async def _supervise(folder: Path, plan: Plan, started: list[Started], failure: CannotStart | None) -> int:
    node = Node(folder, plan, started)
    exit = await node.run(failure)
    return exit_code(exit) if plan.in_image else 0


def exit_code(exit: common_pb2.Exit) -> int:
    """What a container ends with, for those who only look at that."""
    return 0 if exit.reason == "Completed" else exit.exit_code or 1


class Node:
    """What this agent is responsible for."""

    def __init__(self, folder: Path, plan: Plan, started: list[Started]) -> None:
        self._folder = folder
        self._plan = plan
        self._reaper = Reaper()
        self._started = started
        self._gang = Gang(started, self._reaper) if started else None
        self._stop: asyncio.Future[StopOrder] = asyncio.get_running_loop().create_future()
        self._memory = NodeMemory(plan)
        self._pulse = Pulse()
        self._ended = False  # the workers have, or will, for a reason of their own: a peer's failure changes nothing
        self._orphaned = False  # the yard that this node is tied to is gone: there is nobody to deliver to
        self._carriers = Carriers(folder, plan, self._pulse)
        if plan.in_image:
            Echo(self._carriers.journal, several=plan.workers_per_node > 1)

    async def run(self, failure: CannotStart | None) -> common_pb2.Exit:
        """From here to the exit record, whatever happens between."""
        self._reaper.begin()
        self._listen_to_signals()
        session = self._carriers.session
        session.on_stop = self._told_to_stop
        session.take_stacks = self._stacks
        talking = self._carriers.parts.run(TALKING, session.run)
        tied = asyncio.create_task(self._watch_owner())
        try:
            exit = await self._work(failure)
            await self._finish(exit)
            session.phase("ended", exit)
            await session.finish(0 if self._orphaned else SAY_GOODBYE_S, talking)
            return exit
        finally:
            talking.cancel()
            tied.cancel()

    async def _work(self, failure: CannotStart | None) -> common_pb2.Exit:
        """Until no worker and no process below one is left."""
        try:
            if failure is not None:
                raise failure
            prepared = Prepared(self._folder / "work")
            if self._gang is None:
                ready = await self._prepare()
                if isinstance(ready, StopOrder):
                    self._carriers.begin(None, workers_run=False)
                    return self._complete(verdict.stopped(ready))
                prepared = ready
            return await self._run_workers(prepared)
        except NodeFailed as error:
            return await self._failed(error.reason, error.message)
        except CannotStart as error:
            return await self._failed("StartFailed", str(error))

    async def _failed(self, reason: str, message: str) -> common_pb2.Exit:
        self._ended = True
        await self._kill_workers()
        self._carriers.begin(None, workers_run=False)
        self._carriers.journal.say(f"{reason}: {message}")
        return self._complete(common_pb2.Exit(reason=reason, message=message))

    async def _prepare(self) -> Prepared | StopOrder:
        preparing = asyncio.ensure_future(
            prepare(self._plan, self._folder, self._carriers.store, self._reaper, self._carriers.note)
        )
        await _first(preparing, self._stop)
        if preparing.done():
            return preparing.result()
        preparing.cancel()
        return self._stop.result()

    async def _run_workers(self, prepared: Prepared) -> common_pb2.Exit:
        watch = Watch(self._folder, self._plan, self._carriers, self._pulse)
        self._carriers.begin(prepared, workers_run=self._gang is not None)
        if self._gang is None:
            self._start(prepared)
        assert self._gang is not None
        self._carriers.journal.say(_started_line(self._plan, self._started, prepared))
        for reason, text in surroundings.problems(self._plan):
            self._carriers.note(reason, text)
        self._carriers.session.phase("running")
        watch.begin(self._gang)
        try:
            exit = await self._until_over(self._gang)
        finally:
            await self._kill_workers()
            await watch.end()
        exit.memory.CopyFrom(self._memory.use(max(watch.resident_peak, self._gang.resident_peak)))
        return self._complete(exit)

    def _start(self, prepared: Prepared) -> None:
        workers = workers_of(
            self._plan,
            str(self._folder),
            cwd=str(prepared.root),
            python_bin=prepared.python_bin,
            resume_from=prepared.restored.path,
        )
        try:
            start_all(workers, self._started)
        finally:
            self._gang = Gang(self._started, self._reaper)

    async def _until_over(self, gang: Gang) -> common_pb2.Exit:
        """Why the workers ended."""
        silent = asyncio.ensure_future(self._pulse.silent_for(self._plan.hang_timeout_s))
        try:
            await _first(gang.failed, gang.over, self._stop, silent)
        finally:
            silent.cancel()
        self._ended = gang.failed.done() or gang.over.done() or not self._stop.done()
        if gang.failed.done():
            if first_failure.lost_its_peer(gang.failed.result(), str(self._folder)):
                await _first(gang.over, self._stop, timeout_s=LOST_PEER_S)
            failed = await self._stop_and_explain(gang, min(self._plan.grace_s, STOP_PEERS_S))
            assert failed is not None
            return failed
        if gang.over.done():
            return verdict.completed()
        if self._stop.done():
            order = self._stop.result()
            failed = await self._stop_and_explain(gang, order.grace_s)
            # The worker that the peers lost may still be writing its traceback.
            return failed if failed is not None and order.reason == PEER_FAILED else verdict.stopped(order, failed)
        await self._record_hang()
        await gang.stop(min(self._plan.grace_s, STOP_PEERS_S))
        return verdict.hung(self._plan.hang_timeout_s)

    async def _stop_and_explain(self, gang: Gang, grace_s: float) -> common_pb2.Exit | None:
        """Ends the workers; which of them failed first, and how. None when none failed by itself."""
        ended = frozenset(gang.ends)
        await gang.stop(grace_s)
        failure = first_failure.of_node(gang.ends, str(self._folder), self._plan, ended)
        if failure is None:
            return None
        killed = self._memory.use(0).oom_kills > 0
        return verdict.worker_failed(failure, out_of_memory=killed)

    async def _record_hang(self) -> None:
        for stacks in await self._stacks():
            text = stacks.text or f"no stacks: {stacks.error}"
            self._carriers.journal.add(stacks.rank, text.splitlines(), stream="stacks")
        self._carriers.note(
            "Hung", f"no sign of life for {self._plan.hang_timeout_s:g} s; stacks of all ranks are kept"
        )

    async def _kill_workers(self) -> None:
        """Nothing below this process outlives the workers."""
        left = await self._reaper.kill_descendants()
        if left:
            self._carriers.note("ProcessesLeft", f"could not be killed: {', '.join(map(str, left))}")

    def _complete(self, exit: common_pb2.Exit) -> common_pb2.Exit:
        carriers = self._carriers
        verdict.complete(exit, self._plan, carriers.journal.last_lines, carriers.rules.matched)
        exit.resumed_from = carriers.restored.version_id
        exit.progressed = carriers.progressed
        if (far := carriers.tracked.progress).updated_ns:
            exit.progress.step, exit.progress.total_steps = far.step, far.total_steps
            exit.progress.updated_ns = far.updated_ns
        return exit

    async def _finish(self, exit: common_pb2.Exit) -> None:
        """Stores what is left to store, and then the record of how it ended."""
        self._carriers.session.phase("finishing", exit)
        patience = self._plan.finalize_timeout_s
        if self._stop.done():
            patience = min(patience, self._allowed_s(self._stop.result()))
        if self._orphaned:
            patience = 0
        unstored = await self._carriers.finish(exit, patience, self._stop, self._allowed_s)
        if unstored and exit.reason == "Completed":
            exit.reason = "OutputsNotStored"
            exit.message = f"the workers succeeded, but this could not be stored: {'; '.join(unstored)}"
        exit.acknowledged = not unstored
        exit.unstored.extend(unstored)
        if unstored:
            self._carriers.count_unacknowledged(exit)
        try:
            await asyncio.to_thread(write_exit, self._folder, exit)
        except OSError as error:
            # The session says the same; only a launcher that is away as well never hears of it.
            self._carriers.note("ExitNotRecorded", f"the record of the node's end could not be written: {error}")
        if self._plan.in_image:
            try:
                await asyncio.to_thread(write_termination, exit)
            except OSError as error:
                self._carriers.note("ExitNotRecorded", f"the pod's termination message could not be written: {error}")

    def _allowed_s(self, order: StopOrder) -> float:
        return verdict.storing_s(order, self._plan.drain_timeout_s)

    async def _stacks(self) -> list[launcher_pb2.RankStacks]:
        return await take_stacks(self._gang.running if self._gang else (), self._reaper)

    def _order_stop(self, order: StopOrder) -> None:
        if not self._stop.done():
            self._stop.set_result(order)

    def _told_to_stop(self, stop: launcher_pb2.AgentCommand.Stop) -> None:
        if stop.reason == PEER_FAILED and self._ended:
            return  # what the workers made is being stored, which no peer's failure makes worthless
        self._order_stop(StopOrder(stop.reason, stop.grace_s, f"stopped by the launcher: {stop.reason}"))

    def _listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in boot.HELD_BACK:
            name = signal.Signals(number).name
            order = StopOrder("Shutdown", self._plan.grace_s, f"the agent got {name}")
            loop.add_signal_handler(number, self._order_stop, order)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, boot.HELD_BACK)

    async def _watch_owner(self) -> None:
        """Ends the node with the process it is tied to."""
        from trainyard.agent.owner import ended

        if self._plan.tied_to_pid:
            await ended(self._plan.tied_to_pid, self._plan.tied_to_start_time)
            self._orphaned = True
            self._order_stop(StopOrder("Shutdown", self._plan.grace_s, "the process this job belongs to is gone"))


async def _first(*futures: asyncio.Future[Any], timeout_s: float | None = None) -> None:
    """Waits until one of them is done, or the time is up."""
    await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)


def _started_line(plan: Plan, started: list[Started], prepared: Prepared) -> str:
    ranks = (
        f"rank {started[0].worker.rank}"
        if len(started) == 1
        else f"ranks {plan.first_rank} to {started[-1].worker.rank}"
    )
    resumed = prepared.restored
    where = f", resuming from step {resumed.step} ({Path(resumed.path).name})" if resumed.version_id else ""
    return f"attempt {plan.fence}: started {ranks}: {json.dumps(plan.command)}{where}"
