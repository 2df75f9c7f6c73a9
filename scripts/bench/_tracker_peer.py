"""A peer of the tracker, run by the peers' Python: `TRACKER MODE AMOUNT NUMBER`, in the current folder.

MODE `calls`: AMOUNT calls of the tracker's `log` with ten values, one after the other; prints how long each took.
MODE `write`: writes for AMOUNT seconds, as process NUMBER of several, as fast as it can; prints the points handed over.
Both print one JSON object at the end: `{"calls_ns": [...]}` or `{"points", "seconds", "longest_call_s"}`, whose seconds
include `finish`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

NAMES = tuple(f"train/metric{number}" for number in range(10))
BATCH_ROWS = 50  # of mlflow's log_batch: 500 points

# Ten values and a step in; finish out.
Log = Callable[[dict[str, float], int], object]


def start_trackio(number: int) -> tuple[Log, Callable[[], object]]:
    import trackio

    trackio.init(project="bench", name=f"run-{number}", embed=False, auto_log_cpu=False, auto_log_gpu=False)
    return (lambda row, step: trackio.log(row, step=step)), trackio.finish


def start_wandb(number: int) -> tuple[Log, Callable[[], object]]:
    import wandb

    run = wandb.init(project="bench", name=f"run-{number}", mode="offline", settings=wandb.Settings(silent=True))
    return (lambda row, step: run.log(row, step=step)), run.finish


def start_mlflow(number: int) -> tuple[Log, Callable[[], object]]:
    import mlflow

    mlflow.set_tracking_uri("sqlite:///mlflow.db")
    mlflow.set_experiment("bench")
    mlflow.start_run(run_name=f"run-{number}")
    return (lambda row, step: mlflow.log_metrics(row, step=step)), mlflow.end_run


def start_mlflow_batches(number: int) -> tuple[Log, Callable[[], object]]:
    import mlflow
    from mlflow.entities import Metric

    start_mlflow(number)
    client, run_id = mlflow.MlflowClient(), mlflow.active_run().info.run_id
    waiting: list[Metric] = []

    def flush() -> None:
        client.log_batch(run_id, metrics=waiting)
        waiting.clear()

    def log(row: dict[str, float], step: int) -> None:
        now = time.time_ns() // 1_000_000
        waiting.extend(Metric(name, value, now, step) for name, value in row.items())
        if len(waiting) >= BATCH_ROWS * len(NAMES):
            flush()

    return log, flush


STARTS = {
    "trackio": start_trackio,
    "wandb": start_wandb,
    "mlflow": start_mlflow,
    "mlflow-batches": start_mlflow_batches,
}


def calls(log: Log, count: int) -> list[int]:
    row = {name: 0.5 + number for number, name in enumerate(NAMES)}
    clock, took = time.perf_counter_ns, []
    for step in range(count):
        began = clock()
        log(row, step)
        took.append(clock() - began)
    return took


def write(log: Log, seconds: float) -> tuple[int, float]:
    """Points, and the longest call: so long nothing of this process was stored."""
    step, longest_s, now = 0, 0.0, time.monotonic()
    until = now + seconds
    while now < until:
        log({name: step * 0.1 + number for number, name in enumerate(NAMES)}, step)
        step += 1
        began, now = now, time.monotonic()
        longest_s = max(longest_s, now - began)
    return step * len(NAMES), longest_s


def main() -> None:
    tracker, mode, amount, number = sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4])
    # Whatever a tracker prints goes elsewhere: stdout is for the answer.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    log, finish = STARTS[tracker](number)
    if mode == "calls":
        result: dict[str, object] = {"calls_ns": calls(log, int(amount))}
        finish()
    else:
        print("ready", file=answer, flush=True)
        sys.stdin.readline()
        began = time.monotonic()
        points, longest_s = write(log, amount)
        finish()
        result = {"points": points, "seconds": time.monotonic() - began, "longest_call_s": longest_s}
    print(json.dumps(result), file=answer, flush=True)


if __name__ == "__main__":
    main()
