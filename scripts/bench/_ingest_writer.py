"""One of the writing processes of `metrics_ingest`: `tracker.log` of ten values at an even rate, inside of a job.

Arguments: rows per second, rows, when to begin (so that all begin together), a folder to leave a report in. Needs the
standard library and `trainyard.tracker`.
"""

import json
import os
import random
import sys
import time
from pathlib import Path

from trainyard import tracker

NAMES = tuple(f"train/metric{number}" for number in range(10))
DIFFERENT_ROWS = 1_000
TICK_S = 0.01


def table(rank: int) -> list[dict[str, float]]:
    """What a rank logs, over and over: row `step` is `table(rank)[step % DIFFERENT_ROWS]`."""
    numbers = random.Random(rank)
    return [{name: numbers.gauss(0, 1) for name in NAMES} for _ in range(DIFFERENT_ROWS)]


def write(rank: int, rows_per_s: float, total: int) -> dict[str, object]:
    """Logs at an even rate; how many rows were logged when, and what it took."""
    rows, marks, done = table(rank), [], 0
    began_cpu, began = time.process_time(), time.monotonic()
    while done < total:
        due = min(total, int((time.monotonic() - began) * rows_per_s) + 1)
        for step in range(done, due):
            tracker.log(rows[step % DIFFERENT_ROWS], step=step)
        done = due
        marks.append((done, time.time_ns()))
        time.sleep(TICK_S)
    late_s = time.monotonic() - began - total / rows_per_s
    return {"rank": rank, "marks": marks, "cpu_s": time.process_time() - began_cpu, "late_s": late_s}


def main() -> None:
    rows_per_s, total, begin_at_s, folder = float(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), Path(sys.argv[4])
    rank = int(os.environ["RANK"])
    time.sleep(max(0.0, begin_at_s - time.time()))
    report = write(rank, rows_per_s, total)
    (folder / f"rank-{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
