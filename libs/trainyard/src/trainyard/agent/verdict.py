"""Why a node ended: from how its workers ended to the words of an exit record."""

from __future__ import annotations

import json
from dataclasses import dataclass

from trainyard_protos.v1 import common_pb2

from trainyard.agent.contract import error_file
from trainyard.agent.gang import End
from trainyard.agent.plan import Plan

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


def stopped(order: StopOrder) -> common_pb2.Exit:
    reason = order.reason if order.reason == "DeadlineExceeded" else "Stopped"
    return common_pb2.Exit(reason=reason, message=order.message)


def hung(timeout_s: float) -> common_pb2.Exit:
    return common_pb2.Exit(
        reason="Hung",
        message=f"no output, no tracked value and no checkpoint of any worker for {timeout_s:g} s (spec.hangTimeout); "
        "the stacks of all ranks are in the logs",
    )


def worker_failed(end: End, folder: str, *, out_of_memory: bool) -> common_pb2.Exit:
    """The first failing worker decides for its node."""
    exit = common_pb2.Exit(first_failing_rank=end.rank, signal=end.signal)
    if end.exit_code is not None:
        exit.exit_code = end.exit_code
    how = f"was ended by {end.signal}" if end.signal else f"ended with exit code {end.exit_code}"
    if out_of_memory and end.signal == "SIGKILL":
        exit.reason = "OutOfMemory"
        exit.message = (
            f"rank {end.rank} was killed by the kernel: the node used more memory than its limit: raise "
            "spec.resources.memory"
        )
    else:
        exit.reason = "WorkerFailed"
        exit.message = f"rank {end.rank} {how}"
        if raised := _raised(error_file(folder, end.rank)):
            exit.message += f": {raised}"
    return exit


def complete(exit: common_pb2.Exit, plan: Plan, last_lines: list[str], matched_rule: int | None) -> None:
    """Adds what every exit has."""
    exit.node = plan.node
    exit.message = exit.message[:MAX_MESSAGE]
    exit.last_lines.extend(line[:MAX_LAST_LINE] for line in last_lines)
    if matched_rule is not None and exit.reason != "Completed":
        exit.matched_rule = matched_rule


def _raised(path: str) -> str:
    """The exception that torch's `record` decorator noted, or ""."""
    try:
        with open(path) as file:
            message = json.load(file)["message"]
        return str(message["message"] if isinstance(message, dict) else message)
    except (OSError, ValueError, KeyError, TypeError):
        return ""
