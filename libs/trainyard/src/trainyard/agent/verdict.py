"""Why a node ended: from how its workers ended to the words of an exit record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trainyard_protos.v1 import common_pb2

from trainyard.agent.first_failure import WorkerFailure
from trainyard.agent.plan import Plan
from trainyard.exit_meaning import was_killed
from trainyard.source import redacted

MAX_MESSAGE = 2_000
MAX_LAST_LINE = 500


LEAST_DRAIN_S = 10.0


@dataclass(frozen=True, slots=True)
class StopOrder:
    """Somebody wants this node to end."""

    reason: str  # Cancelled | PeerFailed | Stale | DeadlineExceeded | Shutdown
    grace_s: float
    message: str


def storing_s(order: StopOrder, drain_timeout_s: float) -> float:
    """How long storing may take after a stop.

    What is lost with this node has a time of its own, whatever the grace period of the workers is; but who ends the
    whole node waits no longer than that.
    """
    least = max(order.grace_s, LEAST_DRAIN_S)
    return least if order.reason == "Shutdown" else max(least, drain_timeout_s)


def completed() -> common_pb2.Exit:
    return common_pb2.Exit(reason="Completed", exit_code=0)


def stopped(order: StopOrder, failed: common_pb2.Exit | None = None) -> common_pb2.Exit:
    """The exit of a node that was stopped.

    Args:
        failed: how a worker had failed by itself before. That is noted beside the stop: only the launcher knows whether
            a signal to this agent came because of the failure of a peer.
    """
    reason = order.reason if order.reason == "DeadlineExceeded" else "Stopped"
    exit = common_pb2.Exit(reason=reason, message=order.message)
    if failed is not None and failed.HasField("exception"):
        exit.exception.CopyFrom(failed.exception)
        exit.first_failing_rank, exit.local_rank = failed.first_failing_rank, failed.local_rank
        exit.lost_peer, exit.failed_ns = failed.lost_peer, failed.failed_ns
    return exit


def hung(timeout_s: float) -> common_pb2.Exit:
    return common_pb2.Exit(
        reason="Hung",
        message=f"no output, no tracked value and no checkpoint of any worker for {timeout_s:g} s (spec.hangTimeout); "
        "the stacks of all ranks are in the logs",
    )


def worker_failed(failure: WorkerFailure, *, out_of_memory: bool) -> common_pb2.Exit:
    """The worker that failed first decides for its node.

    Args:
        out_of_memory: whether the kernel killed a process of the node at its memory limit.
    """
    end, evidence = failure.end, failure.evidence
    exit = common_pb2.Exit(
        reason="WorkerFailed",
        first_failing_rank=end.rank,
        local_rank=end.local_rank,
        failed_ns=failure.failed_ns,
        last_lines=failure.last_lines,
        lost_peer=evidence.lost_peer,
    )
    if failure.output_rank is not None:
        exit.output_rank = failure.output_rank
    if not failure.cut_short:
        exit.signal = end.signal
        if end.exit_code is not None:
            exit.exit_code = end.exit_code
    if out_of_memory and was_killed(exit):
        exit.reason = "OutOfMemory"
        exit.message = (
            f"rank {end.rank} was killed by the kernel: the node used more memory than its limit: raise "
            "spec.resources.memory"
        )
        return exit
    how = [f"was ended by {end.signal}" if end.signal else f"ended with exit code {end.exit_code}"]
    if evidence.exception is not None:
        exit.exception.type, exit.exception.message = map(without_credentials, evidence.exception)
        raised = ": ".join(filter(None, evidence.exception))
        how = [f"raised {raised}"] if failure.cut_short else [*how, raised]
    exit.message = f"rank {end.rank} {': '.join(how)}"
    return exit


def complete(
    exit: common_pb2.Exit, plan: Plan, last_lines: Callable[[int], list[str]], matched_rule: int | None
) -> None:
    """Adds what every exit has.

    Args:
        last_lines: the newest lines of a rank.
    """
    exit.node = plan.node
    exit.message = without_credentials(exit.message)[:MAX_MESSAGE]
    if exit.reason != "Completed" and not exit.last_lines:
        if not exit.HasField("first_failing_rank"):
            exit.output_rank = plan.first_rank  # none failed first: one of them stands for all
        rank = exit.output_rank if exit.HasField("output_rank") else exit.first_failing_rank
        exit.last_lines.extend(last_lines(rank))
    for index, line in enumerate(exit.last_lines):
        exit.last_lines[index] = without_credentials(line)[:MAX_LAST_LINE]
    if matched_rule is not None and exit.reason != "Completed":
        exit.matched_rule = matched_rule


def without_credentials(text: str) -> str:
    """Words of a worker for the job's record, which more people read than its logs."""
    return redacted(text) if "://" in text else text
