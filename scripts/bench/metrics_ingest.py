"""How many points a second the yard takes in and keeps, beside trackio's shared SQLite and mlflow's `log_batch`.

Ours is a job of eight processes that log ten values a row at an even rate, through one agent, into a yard that
acknowledges after fsync. The rate is raised until it is not sustained: a writer falls behind, or the age of the oldest
row that is not acknowledged goes above a second at more than one in a hundred moments. The highest of these rates
then runs for a minute, compaction included; one that holds for seconds and not for the minute gives way to the next
lower one. Afterwards a reader asks for every single point of the minute and compares it with what was logged. Peers
write with eight processes as fast as they can, and what they stored is counted. All stay on two cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from _bench_yard import bench_yard
from _harness import Bar, conclude, progress, table
from _ingest_job import Ingest, count, ingest
from _ingest_peer import PeerIngest, ingest_peer
from _peers import TRACKERS, environment

BAR_POINTS_PER_S = 300_000
BAR_LAG_S = 1.0
FIRST_RATE = 400_000
GROWTH = 1.25
TRY_S = 10.0
LONG_S = 60.0
PEER_S = 8.0


def sustained(result: Ingest) -> bool:
    return result.lag_p99_s < BAR_LAG_S and result.late_s < BAR_LAG_S


def sustained_rates(run: Callable[[float], Ingest]) -> list[float]:
    """Tries ever higher rates until one is not sustained; those that were."""
    tried: list[float] = []
    rate = float(FIRST_RATE)
    while True:
        progress(f"{rate:,.0f} points/s for {TRY_S:.0f} s")
        if not sustained(run(rate)):
            return tried
        tried.append(rate)
        rate *= GROWTH


def at_length(run: Callable[[float], Ingest], rates: Sequence[float]) -> Ingest:
    """The first of these rates that is sustained; the last one's result when none is."""
    for rate in rates:
        progress(f"{rate:,.0f} points/s at length")
        result = run(rate)
        if sustained(result):
            break
    return result


def measure(folder: Path, *, quick: bool, rounds: int) -> tuple[Ingest, int, dict[str, list[PeerIngest]]]:
    """Our minute, the points the reader found, and what the peers did."""
    python = environment(TRACKERS) / "python"
    peer_s = 2.0 if quick else PEER_S
    peers: dict[str, list[PeerIngest]] = {"trackio": [], "mlflow-batches": []}
    for _ in range(rounds):
        for name, results in peers.items():
            progress(f"{name} for {peer_s:.0f} s")
            results.append(ingest_peer(python, name, peer_s, folder))
    with bench_yard(folder) as yard:

        def run(rate: float, seconds: float = TRY_S) -> Ingest:
            return ingest(yard, Path(tempfile.mkdtemp(dir=folder)) / "reports", rate, seconds)

        rates = [] if quick else sustained_rates(run)
        result = at_length(lambda rate: run(rate, TRY_S if quick else LONG_S), rates[::-1] or [float(FIRST_RATE)])
        progress("counting")
        return result, count(yard, result), peers


def report(result: Ingest, found: int, peers: Mapping[str, Sequence[PeerIngest]]) -> int:
    logged = result.points
    rows = [["yard", f"{result.points_per_s:,.0f}", f"{logged:,}", f"{found:,}", f"{result.lag_p99_s:.2f}"]]
    for name, results in peers.items():
        speed = statistics.median(each.points_per_s for each in results)
        handed, stored = sum(each.handed_over for each in results), sum(each.stored for each in results)
        rows.append([name, f"{speed:,.0f}", f"{handed:,}", f"{stored:,}", "-"])
    table("eight writers", ("", "points/s stored", "logged", "found", "lag p99, s"), rows)
    used = [
        [name, f"{cores:.2f}", f"{result.most_bytes[name] >> 20} MiB" if name in result.most_bytes else "-"]
        for name, cores in result.cpu.items()
    ]
    table("what the yard's run took", ("", "CPU, cores", "memory"), used)
    best = max(peers, key=lambda name: statistics.median(each.points_per_s for each in peers[name]))
    fastest = statistics.median(each.points_per_s for each in peers[best])
    return conclude(
        "metrics_ingest",
        [
            Bar(
                name="points acknowledged",
                ours=result.points_per_s,
                peer=fastest,
                peer_name=best,
                unit="points/s",
                bar=max(BAR_POINTS_PER_S, fastest),
                higher_is_better=True,
            ),
            Bar(
                name="lag p99",
                ours=result.lag_p99_s,
                peer=statistics.median(each.longest_call_s for each in peers["mlflow-batches"]),
                peer_name="mlflow's longest log_batch",
                unit="s",
                bar=BAR_LAG_S,
            ),
            Bar(
                name="points found by a reader",
                ours=float(found),
                peer=float(sum(each.stored for each in peers[best])),
                peer_name=best,
                unit="points",
                bar=float(logged),
                higher_is_better=True,
            ),
        ],
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="of the peers")
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes, at the lowest rate alone")
    arguments = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    with tempfile.TemporaryDirectory(prefix="yard-bench-") as folder:
        rounds = 1 if arguments.quick else arguments.rounds
        return report(*measure(Path(folder), quick=arguments.quick, rounds=rounds))


if __name__ == "__main__":
    sys.exit(main())
