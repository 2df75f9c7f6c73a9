"""Records as messages."""

from __future__ import annotations

import json
from collections.abc import Iterable

from servicekit.events import to_message
from trainyard.exit_meaning import meaning
from trainyard_protos.v1 import common_pb2, scheduler_pb2

from trainyard_scheduler.domain.admission import NOTHING, Amount, Kind, kind_of
from trainyard_scheduler.domain.matching import Taint
from trainyard_scheduler.domain.pending import Pending
from trainyard_scheduler.domain.states import JobState
from trainyard_scheduler.index import Index
from trainyard_scheduler.live_pools import LivePool
from trainyard_scheduler.tables import Attempt, Event, Job


def resources(amount: Amount) -> common_pb2.Resources:
    return common_pb2.Resources(
        cpu=amount.cpu_milli / 1000, memory_bytes=amount.memory_bytes, gpu=amount.gpu, pods=amount.pods
    )


def amount(message: common_pb2.Resources) -> Amount:
    return Amount(round(message.cpu * 1000), message.memory_bytes, message.gpu, message.pods)


def pending(why: Pending) -> scheduler_pb2.Pending:
    return scheduler_pb2.Pending(
        reason=str(why.reason), message=why.message, never_fits=why.never_fits, not_before_ns=why.not_before_ns
    )


def placements(machines: Iterable[str]) -> list[scheduler_pb2.Placement]:
    return [
        scheduler_pb2.Placement(node=node, machine=machine, kind=kind_of(machine))
        for node, machine in enumerate(machines)
    ]


def job(record: Job, index: Index, spec: str = "", attempts: Iterable[Attempt] = ()) -> scheduler_pb2.Job:
    """A job; its spec and attempts only where they are given."""
    message = scheduler_pb2.Job(
        id=record.id,
        workspace=record.workspace,
        name=record.name,
        number=record.number,
        queue=record.queue,
        priority=record.priority,
        state=scheduler_pb2.JobState.ValueType(record.state),
        reason=record.reason,
        message=record.message,
        resolved=spec,
        attempt=record.attempt,
        attempt_id=record.attempt_id,
        retries_used=record.retries_used,
        free_retries_used=record.free_retries_used,
        created_ns=record.created_ns,
        updated_ns=record.updated_ns,
        started_ns=record.started_ns,
        ended_ns=record.ended_ns,
        attempts=[attempt(entry) for entry in attempts],
        event_seq=record.event_seq,
        per_worker=resources(Amount(record.cpu_milli, record.memory_bytes, record.gpu)),
        nodes=record.nodes,
        workers_per_node=record.workers_per_node,
    )
    if record.owner_kind or record.owner_id:
        message.owner.CopyFrom(scheduler_pb2.Owner(kind=record.owner_kind, id=record.owner_id))
    if record.labels != "{}":
        message.labels.update(json.loads(record.labels))
    if record.state == JobState.QUEUED:
        message.pending.CopyFrom(pending(index.pending(record.id)))
    elif record.state == JobState.STARTING and (why := index.awaited(record.attempt_id)).reason:
        message.pending.CopyFrom(pending(why))
    if record.exit:
        message.exit.CopyFrom(ended(record.exit))
    return message


def ended(exit: bytes) -> common_pb2.Exit:
    """The stored record of an end, with what it means: records of earlier versions too."""
    message = common_pb2.Exit.FromString(exit)
    message.meaning = meaning(message)
    return message


def attempt(record: Attempt) -> scheduler_pb2.Attempt:
    message = scheduler_pb2.Attempt(
        id=record.id,
        number=record.number,
        state=record.state,
        pool=record.pool,
        placements=placements(json.loads(record.machines)),
        created_ns=record.created_ns,
        started_ns=record.started_ns,
        ended_ns=record.ended_ns,
    )
    if record.exit:
        message.exit.CopyFrom(ended(record.exit))
    return message


def event(record: Event) -> scheduler_pb2.Event:
    return to_message(record.__dict__)


def pool(live: LivePool) -> scheduler_pb2.Pool:
    return scheduler_pb2.Pool(
        name=live.name,
        launcher_id=live.launcher_id,
        machines=[_machine(live, name) for name in live.offer.machines],
        alive=live.alive,
        seen_ns=live.seen_ns,
        overhead=resources(live.offer.overhead),
        kinds=[_kind(live, each) for each in live.offer.kinds.values()],
    )


def _machine(live: LivePool, name: str) -> scheduler_pb2.Machine:
    machine = live.offer.machines[name]
    return scheduler_pb2.Machine(
        name=name,
        total=resources(machine.total),
        free=resources(live.room.free[name]),
        others=resources(machine.others) if machine.others != NOTHING else None,
        labels=machine.labels,
        taints=_taints(machine.taints),
    )


def _kind(live: LivePool, kind: Kind) -> scheduler_pb2.MachineKind:
    return scheduler_pb2.MachineKind(
        name=kind.name,
        max=kind.max,
        total=resources(kind.total),
        labels=kind.labels,
        taints=_taints(kind.taints),
        provision_timeout_s=kind.provision_timeout_s,
        machines=sorted(kind.machines),
        blocked_until_ns=live.blocked_until_ns.get(kind.name, 0),
    )


def _taints(taints: Iterable[Taint]) -> list[scheduler_pb2.Taint]:
    return [scheduler_pb2.Taint(key=each.key, value=each.value, effect=each.effect) for each in taints]


def assignment(record: Job, held: Attempt, spec: str, database_id: str) -> scheduler_pb2.Assignment:
    return scheduler_pb2.Assignment(
        workspace=record.workspace,
        job_id=record.id,
        job_name=record.name,
        attempt_id=held.id,
        fence=held.number,
        pool=held.pool,
        spec=spec,
        placements=placements(json.loads(held.machines)),
        rejected_checkpoints=json.loads(record.rejected_checkpoints),
        deadline_ns=record.deadline_ns,
        stopping=bool(held.stop_reason),
        database_id=database_id,
        secrets_checked=bool(record.secrets_checked),
    )
