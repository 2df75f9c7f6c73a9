"""How a job ended: what it made and measured, or why it failed; and what is useful next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainyard_protos.v1 import scheduler_pb2 as pb

from trainyard.cli import failures, tables, words
from trainyard.cli.artifact_views import best_by
from trainyard.cli.boundary import ExitCode
from trainyard.cli.terminal import next_steps, say, state, styled
from trainyard.client import states
from trainyard.client.names import BEST, SYSTEM_PREFIX

if TYPE_CHECKING:
    from trainyard_protos.v1 import artifacts_pb2
    from trainyard_protos.v1.metrics_pb2 import SeriesInfo

    from trainyard.client import AsyncClient

_EXIT_CODES = {
    pb.JOB_STATE_SUCCEEDED: ExitCode.DONE,
    pb.JOB_STATE_FAILED: ExitCode.JOB_FAILED,
    pb.JOB_STATE_CANCELLED: ExitCode.JOB_CANCELLED,
}


def exit_code(job: pb.Job) -> int:
    """What a command that waited for this job exits with."""
    return _EXIT_CODES[job.state]


async def sum_up(client: AsyncClient, job: pb.Job) -> None:
    """Writes the summary of an ended job; its last lines are the final values of what the script tracked."""
    versions = [version async for version in client.versions(job=job.id)]
    series = await client.series(job.id)
    say()
    say(_headline(job))
    if job.state == pb.JOB_STATE_FAILED:
        _failure(job)
    elif job.state == pb.JOB_STATE_CANCELLED:
        tables.pairs([("  reason", words.because(job.reason, job.message))])
    tables.pairs([(f"  {name}", value) for name, value in [*_made(versions), *_best(series)]])
    next_steps(*useful_next(job, versions))
    for each in _own(series):
        say(f"{_label(each, series)}: {words.number(each.last_value)}")


def _headline(job: pb.Job) -> str:
    ran = words.between(job.started_ns, job.ended_ns)
    took = f" after {ran}" if ran else " before it ran"
    attempts = f", {words.plural(job.attempt, 'attempt')}" if job.attempt else ""
    return f"{styled(job.name, 'bold')} {state(states.name(job.state))}{took}{attempts} ({words.short(job.id)})"


def _failure(job: pb.Job) -> None:
    failures.show(
        job,
        [
            ("  reason", words.because(job.reason, job.message)),
            ("  retries", f"{job.retries_used} of the budget used, {job.free_retries_used} free"),
        ],
    )


def _made(versions: Sequence[artifacts_pb2.Version]) -> list[tuple[str, str]]:
    checkpoints = [version for version in versions if version.kind == "checkpoint"]
    made = []
    if checkpoints:
        newest = max(checkpoints, key=lambda version: version.checkpoint.step)
        made.append(("checkpoint", f"{_reference(newest)} (step {newest.checkpoint.step})"))
        made += [("best", _best_checkpoint(each)) for each in checkpoints if BEST in each.aliases]
    outputs = [version for version in versions if version.kind == "output"]
    return made + [("output", f"{_reference(each)} ({words.size(each.size)})") for each in outputs]


def _best_checkpoint(version: artifacts_pb2.Version) -> str:
    value = best_by(version)
    return f"{_reference(version)} (step {version.checkpoint.step}{f', {value}' if value else ''})"


def _reference(version: artifacts_pb2.Version) -> str:
    return f"{version.name}@{version.number}"


def _best(series: Sequence[SeriesInfo]) -> list[tuple[str, str]]:
    return [
        (_label(each, series), f"least {words.number(each.min_value)}, greatest {words.number(each.max_value)}")
        for each in _own(series)
        if each.count > 1
    ]


def _own(series: Sequence[SeriesInfo]) -> list[SeriesInfo]:
    """What the script tracked, without what the agent samples."""
    own = [each for each in series if not each.name.startswith(SYSTEM_PREFIX)]
    return sorted(own, key=lambda each: (each.name, each.rank))


def _label(one: SeriesInfo, series: Sequence[SeriesInfo]) -> str:
    """The name of a series, with its rank where several ranks have one of this name."""
    ranks = {each.rank for each in series if each.name == one.name}
    return f"{one.name} (rank {one.rank})" if len(ranks) > 1 else one.name


def useful_next(job: pb.Job, versions: Sequence[artifacts_pb2.Version]) -> list[str]:
    """Commands about an ended job and the versions that it made."""
    identifier = words.short(job.id)
    if job.state != pb.JOB_STATE_SUCCEEDED:
        rank = failures.rank_of_logs(job.exit)
        only = "" if rank is None else f" --rank {rank}"
        return [f"yard logs {identifier}{only}", f"yard explain {identifier}", f"yard retry {identifier}"]
    outputs = [version for version in versions if version.kind == "output"]
    fetch = [f"yard artifacts get {_reference(outputs[0])}"] if outputs else []
    return [f"yard logs {identifier}", f"yard metrics {identifier}", *fetch]
