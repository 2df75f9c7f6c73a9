"""Jobs, events and explanations on a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from trainyard_protos.v1 import launcher_pb2

from trainyard.cli import failures, tables, words
from trainyard.cli.terminal import next_steps, say, state, styled
from trainyard.client import states
from trainyard.client.names import job_reference
from trainyard.errors import YardError

if TYPE_CHECKING:
    from trainyard_protos.v1 import common_pb2
    from trainyard_protos.v1 import scheduler_pb2 as pb

    from trainyard.client import AsyncClient

_ALIVE = ("starting", "running", "stopping", "finalizing")


def listing(jobs: Sequence[pb.Job], *, wide: bool) -> None:
    """A table of jobs."""
    if not jobs:
        say("no jobs")
        next_steps("yard run FILE", "yard jobs --all")
        return
    headers = ["ID", "NAME", "STATE", "AGE", "RAN", "ATTEMPT"]
    rows = [_row(job) for job in jobs]
    if wide:
        headers += ["QUEUE", "PRIORITY", "WORKERS", "RETRIES", "CREATED"]
        rows = [[*row, *_wide(job)] for row, job in zip(rows, jobs, strict=True)]
    stuck = {index for index, job in enumerate(jobs) if job.pending.never_fits}
    tables.show([*headers, "REASON"], [[*row, _why(job)] for row, job in zip(rows, jobs, strict=True)], uncut=stuck)
    newest = words.short(jobs[0].id)
    next_steps(f"yard status {newest}", f"yard logs {newest}", f"yard explain {newest}")


def _row(job: pb.Job) -> list[str]:
    return [
        words.short(job.id),
        _numbered(job),
        state(states.name(job.state)),
        words.between(job.created_ns, 0),
        words.between(job.started_ns, job.ended_ns),
        str(job.attempt or ""),
    ]


def _numbered(job: pb.Job) -> str:
    return job_reference(job) if job.number else job.name


def _wide(job: pb.Job) -> list[str]:
    workers = job.nodes * job.workers_per_node
    retries = job.retries_used + job.free_retries_used
    return [job.queue, str(job.priority), str(workers), str(retries), words.moment(job.created_ns)]


def _why(job: pb.Job) -> str:
    if job.pending.reason:
        return f"{job.pending.reason}: {job.pending.message}"
    return job.reason


async def live(client: AsyncClient, job: pb.Job) -> launcher_pb2.DescribeResponse:
    """What the launcher knows of a running job; empty when it runs nowhere."""
    if states.name(job.state) not in _ALIVE:
        return launcher_pb2.DescribeResponse()
    try:
        return await client.describe(job.id)
    except YardError:  # it ended in this moment, or starts only now
        return launcher_pb2.DescribeResponse()


def detail(job: pb.Job, now: launcher_pb2.DescribeResponse) -> None:
    """One job in full."""
    identifier = words.short(job.id)
    tables.pairs(
        [
            ("job", styled(_numbered(job), "bold")),
            ("id", job.id),
            ("state", f"{state(states.name(job.state))}{_because(job)}"),
            ("queue", f"{job.queue}, priority {job.priority}"),
            ("size", f"{words.plural(job.nodes * job.workers_per_node, 'worker')} × {resources(job.per_worker)}"),
            ("created", words.moment(job.created_ns)),
            ("ran", words.between(job.started_ns, job.ended_ns)),
            ("retries", _retries(job)),
            ("labels", ", ".join(f"{key}={value}" for key, value in sorted(job.labels.items()))),
            ("progress", progress(now.progress)),
        ]
    )
    _attempts(job, now)
    _nodes(now)
    next_steps(*_next(job, identifier))


def _because(job: pb.Job) -> str:
    why = words.because(job.reason, job.message)
    if job.pending.reason:
        why = f"{job.pending.reason}: {job.pending.message}"
    return f" ({why})" if why else ""


def _retries(job: pb.Job) -> str:
    if not job.retries_used and not job.free_retries_used:
        return ""
    return f"{job.retries_used} of the budget, {job.free_retries_used} free"


def resources(amount: common_pb2.Resources) -> str:
    """For instance "2 CPU, 4.0 GiB, 1 GPU"."""
    text = f"{words.number(amount.cpu)} CPU, {words.size(amount.memory_bytes)}"
    return f"{text}, {amount.gpu} GPU" if amount.gpu else text


def progress(now: common_pb2.Progress) -> str:
    """For instance "step 120/600, loss 0.31, 40 s left"."""
    if not now.updated_ns:
        return ""
    parts = [f"step {now.step}/{now.total_steps}" if now.total_steps else f"step {now.step}"]
    parts += [f"{name} {words.number(value)}" for name, value in sorted(now.metrics.items())[:4]]
    if now.HasField("seconds_left"):
        parts.append(f"{words.duration(now.seconds_left)} left")
    return ", ".join(parts)


def _attempts(job: pb.Job, now: launcher_pb2.DescribeResponse) -> None:
    if not job.attempts:
        return
    say()
    rows = [
        [
            str(attempt.number),
            attempt.state,
            words.between(attempt.started_ns, attempt.ended_ns),
            ", ".join(dict.fromkeys(_machines(attempt, now if attempt.number == job.attempt else None))),
            failures.in_one_line(attempt.exit) if attempt.HasField("exit") else "",
        ]
        for attempt in job.attempts
    ]
    tables.show(["ATTEMPT", "STATE", "RAN", "MACHINES", "EXIT"], rows)


def _machines(attempt: pb.Attempt, now: launcher_pb2.DescribeResponse | None) -> Iterator[str]:
    """Where the attempt's nodes are, or which kind of machine they wait for."""
    found = {node.node: node.machine for node in now.nodes} if now is not None else {}
    for placement in attempt.placements:
        yield found.get(placement.node) or (f"new {placement.kind}" if placement.kind else placement.machine)


def _in_the_way(now: launcher_pb2.DescribeResponse) -> None:
    """What keeps nodes from running."""
    for node in now.nodes:
        if node.reason:
            say(f"\nnode {node.node} does not run yet: {styled(node.reason, 'bold')}: {node.message}")


def _nodes(now: launcher_pb2.DescribeResponse) -> None:
    _in_the_way(now)
    workers = [(node, worker) for node in now.nodes for worker in node.workers]
    if not workers:
        return
    say()
    rows = [
        [
            str(worker.rank),
            str(node.node),
            worker.state,
            str(worker.pid),
            words.number(round(worker.usage.cpu, 2)),
            words.size(worker.usage.memory_bytes),
            " ".join(f"{use:.0%}" for use in worker.usage.gpu),
        ]
        for node, worker in workers
    ]
    tables.show(["RANK", "NODE", "STATE", "PID", "CPU", "MEMORY", "GPU"], rows)


def _next(job: pb.Job, identifier: str) -> list[str]:
    match states.name(job.state):
        case "queued":
            return [f"yard explain {identifier}", f"yard cancel {identifier}"]
        case "failed" | "cancelled":
            return [f"yard logs {identifier}", f"yard explain {identifier}", f"yard retry {identifier}"]
        case "succeeded":
            return [f"yard logs {identifier}", f"yard metrics {identifier}", f"yard artifacts list --job {identifier}"]
        case _:
            return [f"yard logs -f {identifier}", f"yard metrics {identifier}", f"yard cancel {identifier}"]


def event(item: pb.Event) -> None:
    """One event in one line."""
    why = words.because(item.reason, item.message)
    name = item.object_name
    if item.object_id not in ("", name):
        name = f"{name} ({words.short(item.object_id)})" if name else words.short(item.object_id)
    when = styled(words.moment(item.time_ns), "dim")
    say(f"{when}  {name}  {styled(item.type, 'bold')}  {styled(item.actor, 'dim')}{f'  {why}' if why else ''}")


def explanation(answer: pb.Explanation, now: launcher_pb2.DescribeResponse) -> None:
    """Why a job is in its state.

    Args:
        now: what keeps its pods from running is known to the launcher alone.
    """
    job = answer.job
    say(f"{styled(job.name, 'bold')} ({words.short(job.id)}) is {state(states.name(job.state))}")
    say(answer.summary)
    if states.name(job.state) == "queued":
        _queued(answer)
    if states.name(job.state) == "failed":
        failures.show(job)
    _in_the_way(now)
    identifier = words.short(job.id)
    next_steps(*(step.replace(job.id, identifier) for step in answer.next or _next(job, identifier)))


def _queued(answer: pb.Explanation) -> None:
    tables.pairs(
        [
            ("position", str(answer.position or "")),
            ("ahead", ", ".join(map(words.short, answer.ahead))),
            ("wanted", resources(answer.wanted) if answer.HasField("wanted") else ""),
            ("free", resources(answer.free) if answer.HasField("free") else ""),
            ("in total", resources(answer.total) if answer.HasField("total") else ""),
        ]
    )
