"""How an attempt failed: which rank, what its exit means, its memory, its last lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainyard import exit_meaning
from trainyard.cli import tables, words
from trainyard.cli.terminal import clean, say

if TYPE_CHECKING:
    from trainyard_protos.v1 import scheduler_pb2 as pb
    from trainyard_protos.v1.common_pb2 import Exit


def in_one_line(ended: Exit) -> str:
    """For instance "WorkerFailed: rank 1: exit code 3"."""
    if ended.reason == exit_meaning.COMPLETED:
        return ended.reason
    rank = f"rank {ended.first_failing_rank}" if ended.HasField("first_failing_rank") else ""
    return ": ".join(filter(None, [ended.reason, rank, ended.meaning or ended.message]))


def show(job: pb.Job, about_job: Sequence[tuple[str, str]] = ()) -> None:
    """Writes how the newest attempt that ended has failed, as far as there is a record of it.

    Args:
        about_job: names and values to show before it.
    """
    ended = job.exit
    told = words.because(job.reason, job.message)
    tables.pairs(
        [
            *about_job,
            ("  failed", _worker(ended)),
            ("  exit", ": ".join(filter(None, [ended.reason, ended.meaning]))),
            ("  message", ended.message if ended.message not in told else ""),
            ("  memory", _memory(ended)),
            ("  rule", f"spec.retries.rules[{ended.matched_rule}]" if ended.HasField("matched_rule") else ""),
            ("  earlier", _earlier(job)),
            ("  not stored", "\n".join(ended.unstored)),
        ]
    )
    if ended.last_lines:
        say(f"  last lines of {_whose(ended)}:")
        for line in ended.last_lines:
            say(f"    {clean(line)}")


def _worker(ended: Exit) -> str:
    """For instance "rank 3 (node 1, local rank 1)"."""
    node = f"node {ended.node}" if ended.HasField("node") else ""
    if not ended.HasField("first_failing_rank"):
        return node
    local = f"local rank {ended.local_rank}" if ended.HasField("local_rank") else ""
    where = ", ".join(filter(None, [node, local]))
    return f"rank {ended.first_failing_rank}{f' ({where})' if where else ''}"


def _memory(ended: Exit) -> str:
    memory = ended.memory
    use = exit_meaning.memory_use(memory)
    if not use:
        return ""
    notes = ["resident, sampled" if memory.sampled else "with file cache"]
    if memory.limit_bytes:
        notes.append("limit of the node" if memory.enforced else "requested; no limit is enforced")
    if memory.oom_kills:
        notes.append(f"oom_kill {memory.oom_kills}")
    return f"{use} ({', '.join(notes)})"


def _earlier(job: pb.Job) -> str:
    """How many attempts came before the one that is shown, where that is the job's newest."""
    before = job.attempt - 1
    if before < 1:
        return ""
    return f"{words.plural(before, 'attempt')}, each with its own end: yard status {words.short(job.id)}"


def _whose(ended: Exit) -> str:
    if ended.HasField("output_rank") and ended.HasField("first_failing_rank"):
        return f"the workers of node {ended.node}"  # a torchrun of the user writes for all of them
    if ended.HasField("output_rank"):
        return f"rank {ended.output_rank}"
    return f"rank {ended.first_failing_rank}" if ended.HasField("first_failing_rank") else f"node {ended.node}"


def rank_of_logs(ended: Exit) -> int | None:
    """The rank whose logs tell of the failure."""
    if ended.HasField("output_rank"):
        return ended.output_rank
    return ended.first_failing_rank if ended.HasField("first_failing_rank") else None
