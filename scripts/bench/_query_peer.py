"""MLflow's reading, run by its own Python in an empty folder: `POINTS RUNS`.

Stores a series of POINTS points, and RUNS runs with the last values of 50 metrics, in its SQLite store. Then answers
every line of standard input, `series`, `values` or `search`, with the milliseconds that took.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

import mlflow
from mlflow.entities import Metric

METRICS = [f"group/metric-{index:02}" for index in range(50)]
BATCH = 1000


def fill(points: int, runs: int) -> str:
    """Returns the id of the run with the long series."""
    client = mlflow.MlflowClient()
    experiment = client.create_experiment("bench")
    long = client.create_run(experiment).info.run_id
    for start in range(0, points, BATCH):
        steps = range(start, min(start + BATCH, points))
        client.log_batch(long, metrics=[Metric("train/loss", 1 / (step + 1), step, step) for step in steps])
    for number in range(runs):
        run = client.create_run(experiment).info.run_id
        values = [Metric(name, ((number * 7919 + index) % 1000) / 1000, 1, 0) for index, name in enumerate(METRICS)]
        client.log_batch(run, metrics=values)
    return long


def questions(long: str, runs: int) -> dict[str, Callable[[], object]]:
    client = mlflow.MlflowClient()
    experiments = [client.get_experiment_by_name("bench").experiment_id]
    name = METRICS[3]
    return {
        "series": lambda: client.get_metric_history(long, "train/loss"),
        "values": lambda: client.search_runs(experiments, max_results=min(runs, 1000)),
        "search": lambda: client.search_runs(
            experiments, f"metrics.`{name}` > 0.5", max_results=100, order_by=[f"metrics.`{name}` DESC"]
        ),
    }


def main(points: int, runs: int) -> None:
    mlflow.set_tracking_uri("sqlite:///mlflow.db")
    answers = questions(fill(points, runs), runs)
    # Its migrations write to standard output: only what comes behind this line is an answer.
    print("ready", flush=True)
    for line in sys.stdin:
        started = time.perf_counter()
        if not answers[line.strip()]():
            raise RuntimeError(f"nothing was found by {line.strip()}")
        print((time.perf_counter() - started) * 1000, flush=True)


if __name__ == "__main__":
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    main(int(sys.argv[1]), int(sys.argv[2]))
