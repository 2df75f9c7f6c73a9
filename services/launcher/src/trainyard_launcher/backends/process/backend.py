"""The process backend: a folder and an agent process per node, all on this machine.

What it must remember is on disk before anything starts (`attempt.json`), and who took a node is what the agent itself
wrote (`started`), so a launcher that was killed at any moment finds everything again.

A node's life: folder and plan -> agent spawned -> agent takes `started` -> agent is gone -> rest is swept -> `NodeEnd`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Collection, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import psutil
from servicekit.ids import now_ns
from servicekit.ports import free_port
from trainyard.cgroup_memory import read as read_memory
from trainyard.home import boot_id
from trainyard.inherited import patterns
from trainyard_protos.v1 import common_pb2, scheduler_pb2
from trainyard_protos.v1.admin_pb2 import GetUsageResponse

from trainyard_launcher.backend import (
    Claim,
    Facts,
    Found,
    Joined,
    JoinRefused,
    Launch,
    NodeEnd,
    Observer,
    Place,
    Shell,
    ShellRequest,
    StartError,
)
from trainyard_launcher.backends.process import cgroups, gpus, sweep
from trainyard_launcher.backends.process.agents import (
    AGENT,
    SECRETS_VARIABLE,
    Salvaged,
    Watch,
    environment,
    salvage,
    spawn,
)
from trainyard_launcher.backends.process.delivery import Delivery
from trainyard_launcher.backends.process.folders import (
    AttemptFolder,
    AttemptRecord,
    NodeRecord,
    Started,
    attempts_in,
)
from trainyard_launcher.backends.process.shell import ProcessShell, surroundings_of
from trainyard_launcher.backends.process.usage import usage
from trainyard_launcher.background import Background
from trainyard_launcher.settings import Settings

T = TypeVar("T")
logger = logging.getLogger(__name__)

_LOG_LINES = 20
_MASTER_ADDR = "127.0.0.1"


class ProcessBackend:
    """Runs nodes as processes. Lives on the loop's thread; what blocks runs in few threads of its own.

    Args:
        home: the yard's folder; attempts are under `attempts/`.
        agent: command that runs a node, given its folder.
    """

    def __init__(self, home: Path, settings: Settings | None = None, agent: Sequence[str] = AGENT) -> None:
        self._agent = tuple(agent)
        self._settings = settings or Settings()
        self._home = home
        self._attempts = home / "attempts"
        declared = self._settings.capacity_gpu
        self._gpus = gpus.Gpus(range(declared) if declared is not None else gpus.detect())
        self._cgroups = cgroups.detect() if self._settings.enforce_limits else cgroups.Cgroups({}, 1, "switched off")
        self._limits_told = False
        self._records: dict[str, AttemptRecord] = {}
        self._watches: dict[tuple[str, int], Watch] = {}
        self._left: dict[str, set[int]] = {}  # nodes that are not over, by attempt
        self._threads = ThreadPoolExecutor(4, "process-backend")
        self._background = Background()
        self._delivery = Delivery(self._deliver_later, self._background)
        self._measuring = asyncio.Lock()
        self._afterwards = asyncio.Lock()  # a folder is marked or removed, not both at once

    @property
    def keeps_records(self) -> bool:
        """Yes: in the folders of the attempts."""
        return True

    def offer(self) -> scheduler_pb2.RegisterPoolRequest:
        """This machine, with what the settings declare or what it has. Agents are processes beside the jobs', with
        limits above what these ask for: they take nothing that is counted."""
        settings = self._settings
        total = common_pb2.Resources(
            cpu=settings.capacity_cpu or len(os.sched_getaffinity(0)),
            memory_bytes=settings.capacity_memory or psutil.virtual_memory().total,
            gpu=len(self._gpus.indices),
        )
        return scheduler_pb2.RegisterPoolRequest(machines=[scheduler_pb2.Machine(name=settings.machine, total=total)])

    async def changed(self) -> None:
        """Never returns: a machine stays what it is."""
        await asyncio.Event().wait()

    # Finding what an earlier life left

    async def open(self, observer: Observer) -> Sequence[Found]:
        """Watches the agents that live, ends what the dead ones left, and says what was found."""
        self._observer = observer
        found: list[Found] = []
        lost: list[tuple[str, int]] = []
        for folder, record in await self._in_thread(self._scan):
            found.append(await self._take_over(folder, record, lost))
        # Delivering what dead agents left needs metrics, which may come up after this: their ends are told later.
        for attempt_id, index in lost:
            self._look(attempt_id, index)
        for attempt_id, index in await self._in_thread(self._undelivered):
            self._delivery.add(attempt_id, index)
        for attempt_id in await self._in_thread(self._with_copies):
            self._background.run(self._remove_copies(attempt_id), f"removal of copies of {attempt_id}")
        return found

    def _with_copies(self) -> list[str]:
        return [folder.path.name for folder in attempts_in(self._attempts) if folder.over and folder.has_copies()]

    def _undelivered(self) -> list[tuple[str, int]]:
        """Nodes of attempts that are over; the others are looked at when they end."""
        return [
            (folder.path.name, index)
            for folder in attempts_in(self._attempts)
            if folder.over
            for index in folder.undelivered()
        ]

    def _scan(self) -> list[tuple[AttemptFolder, AttemptRecord]]:
        """Attempts that may not be over; processes of all others are ended."""
        alive = sweep.attempts_alive()
        unfinished = []
        for folder in attempts_in(self._attempts):
            record = None if folder.over else folder.read()
            if record is not None:
                unfinished.append((folder, record))
            elif folder.path.name in alive:
                self._sweep(sweep.Target(folder.path.name))
        return unfinished

    async def _take_over(self, folder: AttemptFolder, record: AttemptRecord, lost: list[tuple[str, int]]) -> Found:
        attempt_id = record.facts.attempt_id
        self._hold(record)
        ends, unstarted = [], []
        for index in range(len(record.nodes)):
            started = await self._who(attempt_id, index)
            if started is None:
                unstarted.append(index)
            elif started.alive and self._watch_agent(attempt_id, index, started):
                continue
            elif folder.node(index).exit() is None:
                lost.append((attempt_id, index))
            else:
                ends.append(await self._finish(attempt_id, index))
        return Found(record.facts, ends, unstarted)

    def _hold(self, record: AttemptRecord) -> None:
        attempt_id = record.facts.attempt_id
        self._records[attempt_id] = record
        self._left[attempt_id] = set(range(len(record.nodes)))
        self._gpus.hold(attempt_id, (index for node in record.nodes for index in node.gpus))

    # Starting

    async def start(self, launch: Launch) -> str:
        """Writes the record, then starts the agents that never were; see `Backend.start`."""
        attempt_id = launch.facts.attempt_id
        record: AttemptRecord | None = None
        try:
            record = self._records.get(attempt_id) or await self._in_thread(self._folder(attempt_id).read)
            if record is None:
                record = self._allocate(launch)
                await self._in_thread(self._folder(attempt_id).write, record)
                self._tell_what_is_left_alone(launch)
            if attempt_id not in self._records:
                self._hold(record)
            children = await self._in_thread(self._spawn_missing, launch, record)
        except gpus.NotEnoughGpus as error:
            raise StartError(str(error)) from error
        except OSError as error:
            await self._undo(attempt_id, record)
            raise StartError(f"cannot start on {self._settings.machine}: {error}") from error
        for index in range(launch.facts.nodes):
            child = children.get(index)
            if child is None:
                self._look(attempt_id, index)
            else:
                self._keep(attempt_id, index, Watch.child(child, self._looking(attempt_id, index)))
        return self._limits_note()

    def _tell_what_is_left_alone(self, launch: Launch) -> None:
        spec = launch.spec
        given = [name for name in ("image", "kubernetes") if spec is not None and getattr(spec, name) is not None]
        if given:
            fields = " and ".join(f"spec.{name}" for name in given)
            self._observer.remark(launch.facts.attempt_id, "ClusterOnly", f"{fields}: used on a cluster, not here")

    def _allocate(self, launch: Launch) -> AttemptRecord:
        facts = launch.facts
        workers = facts.workers_per_node
        shares = self._gpus.take(facts.attempt_id, [launch.per_worker.gpu * workers] * facts.nodes)
        cpu = launch.per_worker.cpu * workers + max(self._settings.agent_cpu, self._settings.agent_cpu_limit)
        memory = launch.per_worker.memory_bytes * workers + self._settings.agent_memory
        nodes = []
        for index, share in enumerate(shares):
            name = f"trainyard-{facts.attempt_id}-{index}"
            nodes.append(NodeRecord(share, self._cgroups.create(name, cpu, memory)))
        taken = {record.master_port for record in self._records.values()}
        return AttemptRecord(facts, tuple(nodes), free_port(taken), now_ns())

    def _spawn_missing(self, launch: Launch, record: AttemptRecord) -> dict[int, subprocess.Popen[bytes]]:
        attempt_id = launch.facts.attempt_id
        missing = []
        for index, plan in enumerate(launch.plans):
            folder = self._folder(attempt_id).node(index)
            if folder.started() is None:
                plan.gpus[:] = record.nodes[index].gpus
                plan.cgroup_procs[:] = cgroups.procs_files(record.nodes[index].cgroups)
                plan.master_addr, plan.master_port = _MASTER_ADDR, record.master_port
                plan.state_dir = str(self._home / "cache")
                plan.threads = launch.threads if self._cgroups.limits_cpu else 0
                folder.write_plan(plan)
                missing.append((index, folder))
        secrets = {SECRETS_VARIABLE: json.dumps(dict(launch.secrets))} if launch.secrets else {}
        return {
            index: spawn(self._agent, folder, self._environment(attempt_id, index) | secrets)
            for index, folder in missing
        }

    async def _undo(self, attempt_id: str, record: AttemptRecord | None) -> None:
        """Ends what a failed start began, and keeps later starts of it from happening."""
        begun = attempt_id in self._records
        if not begun:
            await self._in_thread(self._folder(attempt_id).remove_unwritten)
        try:
            for index, node in enumerate(record.nodes if record else ()):
                if not begun:  # its record was not written, so nothing of it ever ran
                    await self._in_thread(cgroups.remove, node.cgroups)
                    continue
                try:
                    await self._in_thread(self._folder(attempt_id).node(index).take)
                except OSError:  # what kept the start from happening, a full disk for instance, keeps this too
                    logger.exception("a node of a failed start was not taken", extra={"attempt": attempt_id})
                await self._finish(attempt_id, index)
        finally:
            self._gpus.release(attempt_id)

    def _limits_note(self) -> str:
        if self._limits_told or not self._cgroups.why_not:
            return ""
        self._limits_told = True
        return f"limits are not enforced here: {self._cgroups.why_not}"

    async def join(self, attempt_id: str, node: int, credential: str, claim: Claim) -> Joined:
        """Agents of this machine find their plan in their folder."""
        raise JoinRefused("this launcher runs agents on its own machine: none of them has to join")

    # Watching

    def _watch_agent(self, attempt_id: str, index: int, started: Started) -> bool:
        """Whether an agent that says it was started is there to be watched."""
        try:
            watch = Watch.other(started.pid, started.start_time, self._looking(attempt_id, index))
        except ProcessLookupError:
            return False
        self._keep(attempt_id, index, watch)
        return True

    def _keep(self, attempt_id: str, index: int, watch: Watch) -> None:
        if (earlier := self._watches.pop((attempt_id, index), None)) is not None:
            earlier.close()
        self._watches[attempt_id, index] = watch

    def _looking(self, attempt_id: str, index: int) -> Callable[[], None]:
        return lambda: self._look(attempt_id, index)

    def _look(self, attempt_id: str, index: int) -> None:
        watch = self._watches.pop((attempt_id, index), None)
        self._background.run(self._look_again(attempt_id, index, watch), f"end of {attempt_id}/{index}")

    async def _look_again(self, attempt_id: str, index: int, watch: Watch | None) -> None:
        """An agent has ended, or was not there: another may hold the node (a doubled start), else the node is over."""
        try:
            started = await self._who(attempt_id, index)
            if started is None or not (started.alive and self._watch_agent(attempt_id, index, started)):
                await self._deliver(attempt_id, index)
        finally:
            if watch is not None:
                watch.reap()  # not before its session was swept: as a zombie it keeps its pid

    async def _who(self, attempt_id: str, index: int) -> Started | None:
        return await self._in_thread(self._folder(attempt_id).node(index).started)

    async def _deliver(self, attempt_id: str, index: int) -> None:
        self._observer.ended(await self._finish(attempt_id, index))

    async def _finish(self, attempt_id: str, index: int) -> NodeEnd:
        """Ends the rest of a node and gives back what it had."""
        record = self._records[attempt_id]
        end = await self._in_thread(self._end_node, attempt_id, index, record.nodes[index])
        if end.exit is None or not end.exit.acknowledged:
            await self._keep_records(attempt_id, index, end.exit)
        left = self._left.setdefault(attempt_id, set())
        left.discard(index)
        if not left:
            self._gpus.release(attempt_id)
        return end

    async def _keep_records(self, attempt_id: str, index: int, exit: common_pb2.Exit | None) -> None:
        """Sees to it that metrics gets what it lacks of a node, if not now, then later.

        Args:
            exit: how the node's agent says that it ended. One that died without a word did not even read all output: of
                its node, the first try is waited for.
        """
        folder = self._folder(attempt_id)
        if not await self._in_thread(folder.node(index).has_records):
            return
        try:
            await self._in_thread(folder.mark_undelivered, index)
        except OSError as error:  # the disk is full
            logger.error("records not marked", extra={"attempt": attempt_id, "node": index, "why": str(error)})
        if exit is None and await self._salvage(attempt_id, index):
            return
        if exit is None or exit.unacknowledged_lines or exit.unacknowledged_rows:
            what = f"{exit.unacknowledged_lines:,} lines and {exit.unacknowledged_rows:,} rows" if exit else "records"
            text = f"metrics has not taken {what} of node {index} yet: they are kept, and delivered when it takes them"
            self._observer.remark(attempt_id, "RecordsDelayed", text)

    async def _deliver_later(self, attempt_id: str, index: int) -> bool:
        """Delivers what a node of an attempt that is over left; whether that is done, or will never be.

        Raises:
            grpc.aio.AioRpcError: metrics is away.
        """
        folder = self._folder(attempt_id)
        record = await self._in_thread(folder.read)
        if record is None:
            return True  # nothing of it is left
        if index in await self._in_thread(folder.undelivered):
            writers = await self._in_thread(folder.undelivered_writers)
            token = await self._observer.delivery_token(record.facts, writers)
            if not await self._salvage(attempt_id, index, token):
                return False
        if not await self._in_thread(folder.undelivered):
            await self._observer.delivered(record.facts)
        return True

    async def _salvage(self, attempt_id: str, index: int, token: str = "") -> bool:
        """Delivers what a node left; whether that is done, or will never be."""
        folder = self._folder(attempt_id)
        result = await salvage(folder.node(index), self._environment(attempt_id, index), token)
        if result is Salvaged.NOT_NOW:
            return False
        if result is Salvaged.REFUSED:
            where = folder.node(index).log
            logger.error("records refused", extra={"attempt": attempt_id, "node": index, "why": f"see {where}"})
            text = f"metrics refuses lines or points of node {index}; {where} says why, and its folder has them"
            self._observer.remark(attempt_id, "RecordsLost", text)
        await self._in_thread(folder.mark_delivered, index)
        return True

    def _end_node(self, attempt_id: str, index: int, node: NodeRecord) -> NodeEnd:
        folder = self._folder(attempt_id).node(index)
        started = folder.started()
        same_boot = started is not None and started.pid > 0 and started.boot_id == boot_id()
        agent = sweep.Leader(started.pid, started.start_time) if started is not None and same_boot else None
        self._sweep(sweep.Target(attempt_id, index, agent, folder.path, node.cgroups))
        end = NodeEnd(attempt_id, index, folder.exit(), *_memory(node))
        cgroups.remove(node.cgroups)
        return end

    def _sweep(self, target: sweep.Target) -> None:
        try:
            killed = sweep.end_all(target, self._settings.sweep_timeout_s)
        except TimeoutError:
            logger.exception("processes left behind", extra={"attempt": target.attempt_id, "node": target.node})
            return
        if killed:
            logger.info("processes ended", extra={"attempt": target.attempt_id, "node": target.node, "count": killed})

    # Stopping

    async def stop(self, attempt_id: str, node: int, *, kill: bool) -> None:
        """SIGTERM to the agent, or SIGKILL to everything of the node."""
        if attempt_id not in self._records or node not in self._left.get(attempt_id, ()):
            return
        folder = self._folder(attempt_id).node(node)
        watch = self._watches.get((attempt_id, node))
        if watch is None:
            # Nobody runs it: take it, so that nobody ever does. When it is taken, its end is under way.
            if await self._in_thread(folder.take):
                await self._deliver(attempt_id, node)
        elif kill:
            watch.signal(signal.SIGKILL)  # its end, once noticed, takes the rest along
        else:
            watch.signal(signal.SIGTERM)

    # What users ask

    async def logs(self, attempt_id: str, node: int) -> Sequence[str]:
        """The end of the node's agent.log."""
        return await self._in_thread(self._folder(attempt_id).node(node).log_tail, _LOG_LINES)

    def place(self, attempt_id: str, node: int) -> Place:
        """Folder and devices of a node."""
        record = self._records.get(attempt_id)
        folder = str(self._folder(attempt_id).node(node).path)
        return Place(self._settings.machine, folder, record.nodes[node].gpus if record else ())

    def awaits_machines(self, attempt_id: str) -> bool:
        """Never: this machine is there."""
        return False

    async def shell(self, attempt_id: str, node: int, request: ShellRequest) -> Shell:
        """A shell with a running worker's folder and environment; with the node's, while the worker does not run."""
        folder = self._folder(attempt_id).node(node)
        try:
            cwd, environ = await self._in_thread(surroundings_of, request.worker_pid)
        except OSError:
            environ = self._environment(attempt_id, node) | dict(folder.plan().env)
            work = folder.path / "work"
            cwd = work if work.is_dir() else folder.path
        return await ProcessShell.open(request, cwd, environ)

    # Afterwards

    async def undelivered(self, attempt_id: str) -> Sequence[str]:
        """The writers of nodes that are marked."""
        return await self._in_thread(self._folder(attempt_id).undelivered_writers)

    async def settle(self, attempt_id: str) -> None:
        """Marks the folder; processes are gone already. What metrics lacks is delivered from now on."""
        self._records.pop(attempt_id, None)
        self._left.pop(attempt_id, None)
        async with self._afterwards:
            try:
                await self._in_thread(self._folder(attempt_id).mark_over)
            except OSError as error:  # the disk is full: the next launcher reports this end once more
                logger.error("attempt not marked as over", extra={"attempt": attempt_id, "why": str(error)})
            undelivered = await self._in_thread(self._folder(attempt_id).undelivered)
        for index in undelivered:
            self._delivery.add(attempt_id, index)
        self._background.run(self._remove_copies(attempt_id), f"removal of copies of {attempt_id}")

    async def _remove_copies(self, attempt_id: str) -> None:
        """Removes copies of what the artifact store has; what cannot be removed now, the next launcher tries again."""
        async with self._afterwards:
            try:
                await self._in_thread(self._folder(attempt_id).remove_copies)
            except OSError as error:
                logger.error("copies not removed", extra={"attempt": attempt_id, "why": str(error)})

    async def held(self) -> Sequence[Facts]:
        """Those whose folders are marked as over."""
        return await self._in_thread(self._read_over)

    def _read_over(self) -> Sequence[Facts]:
        records = [folder.read() for folder in attempts_in(self._attempts) if folder.over]
        return [record.facts for record in records if record is not None]

    async def usage(self, job_ids: Collection[str] = ()) -> GetUsageResponse:
        """Measures the folders of attempts; one count at a time, since they share the disk."""
        async with self._measuring:
            return await asyncio.to_thread(usage, self._home, frozenset(job_ids))

    async def forget(self, attempt_ids: Sequence[str]) -> AbstractSet[str]:
        """Removes folders; attempts that are not over keep theirs.

        Their runs go as well, so what metrics lacks of them is not delivered any more.
        """
        over = [attempt_id for attempt_id in attempt_ids if attempt_id not in self._records]
        await self._delivery.drop(over)
        async with self._afterwards:
            return await self._in_thread(self._remove, over)

    def _remove(self, attempt_ids: Sequence[str]) -> AbstractSet[str]:
        gone = set()
        for attempt_id in attempt_ids:
            try:
                shutil.rmtree(self._folder(attempt_id).path)
            except FileNotFoundError:
                gone.add(attempt_id)
            except OSError as error:
                logger.error("folder not removed", extra={"attempt": attempt_id, "why": str(error)})
            else:
                gone.add(attempt_id)
        return gone

    async def close(self) -> None:
        """Stops watching."""
        for watch in self._watches.values():
            watch.close()
        self._watches.clear()
        await self._background.close()
        self._threads.shutdown(wait=True)

    def _environment(self, attempt_id: str, node: int) -> dict[str, str]:
        return environment(self._home, attempt_id, node, patterns(self._settings.inherit_environment))

    def _folder(self, attempt_id: str) -> AttemptFolder:
        return AttemptFolder(self._attempts / attempt_id)

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)


def _memory(node: NodeRecord) -> tuple[bool, common_pb2.MemoryUse | None]:
    """Whether the kernel killed a process of a node at its memory limit, and what the node used."""
    found = read_memory(node.cgroups)
    if found is None:
        return False, None
    use = common_pb2.MemoryUse(
        peak_bytes=found.peak_bytes,
        limit_bytes=found.limit_bytes,
        sampled=not found.peak_bytes,
        enforced=found.limit_bytes > 0,
        oom_kills=found.oom_kills,
    )
    return found.oom_kills > 0, use
