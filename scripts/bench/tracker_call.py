"""What one call of the tracker costs the training process, beside trackio, wandb offline and mlflow.

Each case is a process of its own that logs a dict of ten values in a tight loop and times every call on its own thread;
the tracker's is a plain script whose numbers are shipped meanwhile to a yard that is up. All stay on two cores.

Bars: p50 at most 10 and p99 at most 50 microseconds, no call above 6 ms, each below the fastest peer's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from _bench_yard import BenchYard, bench_yard
from _harness import Bar, clean_environment, conclude, interleave, table
from _peers import TRACKERS, environment

CALLS = 10_000
MLFLOW_CALLS = 1_000  # of 10,000 microseconds each
HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Calls:
    """One process's calls, in microseconds."""

    p50: float
    p99: float
    most: float

    @classmethod
    def of(cls, nanoseconds: Sequence[int]) -> Calls:
        ordered = sorted(nanoseconds)
        return cls(*(ordered[int(share * (len(ordered) - 1))] / 1000 for share in (0.5, 0.99, 1.0)))


def time_tracker(yard: BenchYard) -> Calls:
    return _time([sys.executable, str(HERE / "_tracker_calls.py"), str(CALLS)], yard.environment, yard.home)


def time_peer(python: Path, name: str, calls: int) -> Calls:
    with tempfile.TemporaryDirectory(prefix="peer-") as folder:
        env = clean_environment(TRACKIO_DIR=folder, WANDB_DIR=folder)
        return _time([str(python), str(HERE / "_tracker_peer.py"), name, "calls", str(calls), "0"], env, Path(folder))


def _time(command: list[str], env: Mapping[str, str], folder: Path) -> Calls:
    done = subprocess.run(command, env=env, cwd=folder, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return Calls.of(json.loads(done.stdout.splitlines()[-1])["calls_ns"])


def measure(rounds: int, quick: bool) -> dict[str, list[Calls]]:
    python = environment(TRACKERS) / "python"
    with tempfile.TemporaryDirectory(prefix="yard-bench-") as folder, bench_yard(Path(folder)) as yard:
        cases: dict[str, Callable[[], Calls]] = {
            "tracker": lambda: time_tracker(yard),
            "trackio": lambda: time_peer(python, "trackio", CALLS),
            "wandb offline": lambda: time_peer(python, "wandb", CALLS),
            "mlflow": lambda: time_peer(python, "mlflow", MLFLOW_CALLS // (10 if quick else 1)),
        }
        return interleave(cases, rounds, warmups=0 if quick else 1)


def report(results: Mapping[str, Sequence[Calls]]) -> int:
    middle = {
        name: Calls(*(statistics.median(getattr(each, field) for each in found) for field in Calls.__slots__))
        for name, found in results.items()
    }
    rows = [[name, *(f"{value:,.1f}" for value in (each.p50, each.p99, each.most))] for name, each in middle.items()]
    table("one call, microseconds (medians of the rounds)", ("", "p50", "p99", "max"), rows)
    ours = middle.pop("tracker")
    bars = []
    for field, limit in (("p50", 10.0), ("p99", 50.0), ("most", 6_000.0)):
        peer = min(middle, key=lambda name: float(getattr(middle[name], field)))
        best = float(getattr(middle[peer], field))
        # To be the fastest counts for the usual call; the longest one is a bar of its own.
        bar = limit if field == "most" else min(limit, best)
        value = max(each.most for each in results["tracker"]) if field == "most" else float(getattr(ours, field))
        bars.append(Bar(name=f"{field} of a call", ours=value, peer=best, peer_name=peer, unit="us", bar=bar))
    return conclude("tracker_call", bars)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round, fewer calls where calls are slow")
    arguments = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    return report(measure(1 if arguments.quick else arguments.rounds, arguments.quick))


if __name__ == "__main__":
    sys.exit(main())
