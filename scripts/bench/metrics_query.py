"""Reading metrics: a long series down to a screen's width, last values of many runs, a search by metric.

The service runs in a process of its own and is asked over gRPC; what is timed is the call as its caller sees it. The
series lies in column files, with a tail in the journal. MLflow answers from its SQLite store without a server in
between, over a share of the points and of the runs: storing all of them would take it most of an hour.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import grpc
import numpy as np
from _harness import Bar, clean_environment, conclude, interleave, progress, spread, table
from _peers import TRACKERS, environment
from servicekit.auth import AttemptTokens, bearer_token
from servicekit.ids import new_id
from trainyard_protos.v1 import metrics_pb2 as pb
from trainyard_protos.v1.metrics_pb2_grpc import MetricsServiceStub

T = TypeVar("T")

METRICS = [f"group/metric-{index:02}" for index in range(50)]
PIXELS = 1000
LISTED = 1000
BATCH = 4096
START_TIMEOUT_S = 60
BARS_MS = {"series": 150, "values": 100, "search": 100}


class Service:
    """A metrics ingestor of its own, and what it is asked. Every question is a new one: no answer is remembered."""

    def __init__(self, stub: MetricsServiceStub, runs: int, points: int) -> None:
        self._stub = stub
        self._runs = runs
        self._points = points
        self._asked = 0
        self._long = new_id()

    def fill(self) -> None:
        """Stores the long series, then runs with the last values of 50 metrics."""
        rng = np.random.default_rng(0)
        ids = [new_id() for _ in range(self._runs)]
        self._open(self._long)
        self._append(self._rows(start, rng) for start in range(0, self._points, BATCH))
        for run_id in ids:
            self._open(run_id)
        self._append(_one_row(run_id, rng.random(len(METRICS))) for run_id in ids)

    def read_series(self) -> float:
        """Milliseconds for the long series down to a screen's width."""
        self._asked += 1
        selector = pb.SeriesSelector(run_id=self._long, names=["train/loss"])
        request = pb.QuerySeriesRequest(selector=selector, max_points=PIXELS, from_step=-self._asked)
        elapsed, answer = _timed(lambda: self._stub.QuerySeries(request))
        (series,) = answer.series
        if series.total != self._points or not 0 < len(series.value) <= PIXELS:
            raise RuntimeError(f"{series.total:,} points became {len(series.value):,}")
        return elapsed

    def read_values(self) -> float:
        """Milliseconds for the last values of 50 metrics of 1,000 runs."""
        request = pb.SearchRunsRequest(names=METRICS, page_size=LISTED)
        elapsed, answer = _timed(lambda: self._stub.SearchRuns(request))
        found = sum(count > 0 for run in answer.runs for count in run.count)
        if len(answer.runs) != LISTED or found != LISTED * len(METRICS):
            raise RuntimeError(f"{len(answer.runs):,} runs with {found:,} values came")
        return elapsed

    def search(self) -> float:
        """Milliseconds for the best 100 of all runs with a metric above a limit."""
        self._asked += 1
        metric = METRICS[self._asked % len(METRICS)]
        query = pb.SearchRunsRequest(
            filter=f'metrics["{metric}"] > 0.5', order_by=f'metrics["{metric}"] desc', names=[metric], page_size=100
        )
        elapsed, answer = _timed(lambda: self._stub.SearchRuns(query))
        values = [run.last_value[0] for run in answer.runs]
        if len(values) != 100 or values != sorted(values, reverse=True) or values[-1] <= 0.5:
            raise RuntimeError("the search found the wrong runs")
        return elapsed

    def _open(self, run_id: str) -> None:
        self._stub.OpenRun(pb.OpenRunRequest(run=pb.Run(id=run_id, name="bench")))

    def _append(self, batches: Iterator[pb.AppendRequest]) -> None:
        for number, _ in enumerate(self._stub.Append(batches)):
            progress(f"storing: batch {number + 1:,}")

    def _rows(self, start: int, rng: np.random.Generator) -> pb.AppendRequest:
        step = np.arange(start, min(start + BATCH, self._points), dtype="<i8")
        block = pb.Block(
            names=["train/loss"],
            step=step.tobytes(),
            time_ns=(step * 1_000_000 + rng.integers(0, 500_000, len(step))).tobytes(),
            value=(np.exp(-step / 300_000) + rng.normal(0, 0.01, len(step))).tobytes(),
        )
        rows = pb.Rows(count=len(step), blocks=[block])
        return pb.AppendRequest(run_id=self._long, writer_id="w", first_seq=start, rows=rows)


def _one_row(run_id: str, values: Any) -> pb.AppendRequest:
    block = pb.Block(names=METRICS, step=np.int64(0).tobytes(), time_ns=np.int64(1).tobytes(), value=values.tobytes())
    return pb.AppendRequest(run_id=run_id, writer_id=run_id, first_seq=0, rows=pb.Rows(count=1, blocks=[block]))


def _timed(call: Callable[[], T]) -> tuple[float, T]:
    started = time.perf_counter()
    answer = call()
    return (time.perf_counter() - started) * 1000, answer


class _Token(grpc.UnaryUnaryClientInterceptor, grpc.StreamStreamClientInterceptor):
    """Sends the user's token with every call."""

    def __init__(self, token: str) -> None:
        self._metadata = (("authorization", f"Bearer {token}"),)

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        return continuation(details._replace(metadata=self._metadata), request)

    def intercept_stream_stream(self, continuation: Any, details: Any, requests: Any) -> Any:
        return continuation(details._replace(metadata=self._metadata), requests)


@contextlib.contextmanager
def service(home: Path) -> Iterator[MetricsServiceStub]:
    """A metrics ingestor in a process of its own."""
    token = bearer_token(home)
    AttemptTokens.load_or_create(home)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "trainyard_metrics", "--home", str(home), "--listen", address]
    with (home / "service.log").open("wb") as log:
        process = subprocess.Popen(command, env=clean_environment(), stdout=log, stderr=log)
    try:
        with grpc.insecure_channel(address) as channel:
            grpc.channel_ready_future(channel).result(timeout=START_TIMEOUT_S)
            yield MetricsServiceStub(grpc.intercept_channel(channel, _Token(token)))
    finally:
        process.terminate()
        process.wait(START_TIMEOUT_S)


@contextlib.contextmanager
def mlflow(folder: Path, points: int, runs: int) -> Iterator[Callable[[str], float]]:
    """MLflow with its share of the data; what is yielded asks it and returns milliseconds."""
    folder.mkdir()
    command = [environment(TRACKERS) / "python", Path(__file__).with_name("_query_peer.py").resolve()]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [*map(str, command), str(points), str(runs)], cwd=folder, stdin=pipe, stdout=pipe, text=True, bufsize=1
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        stdin, stdout = process.stdin, process.stdout
        progress("storing in MLflow")
        for line in stdout:
            if line.strip() == "ready":
                break

        def ask(question: str) -> float:
            stdin.write(f"{question}\n")
            return float(stdout.readline())

        try:
            yield ask
        finally:
            stdin.close()


def bars(results: dict[str, list[float]], points: int, runs: int, share: int) -> Sequence[Bar]:
    """Ours against MLflow's, medians."""
    titles = {
        "series": f"{points:,} points to {PIXELS:,}",
        "values": f"last values, {len(METRICS)} metrics of {LISTED:,} runs",
        "search": f"search over {runs:,} runs by metric",
    }
    return [
        Bar(
            name=titles[what],
            ours=spread(results[f"yard: {what}"])[0],
            peer=spread(results[f"mlflow: {what}"])[0],
            peer_name=f"mlflow, 1/{share} of the data",
            unit="ms",
            bar=limit,
        )
        for what, limit in BARS_MS.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--runs", type=int, default=10_000, help="at least 1,000")
    parser.add_argument("--points", type=int, default=1_000_000)
    parser.add_argument("--peer-share", type=int, default=10, help="MLflow gets one of so many points and runs")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="metrics-query-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        ours = Service(stack.enter_context(service(folder / "home")), given.runs, given.points)
        ours.fill()
        share = given.peer_share
        ask = stack.enter_context(mlflow(folder / "mlflow", given.points // share, given.runs // share))
        cases: dict[str, Callable[[], float]] = {
            "yard: series": ours.read_series,
            "mlflow: series": lambda: ask("series"),
            "yard: values": ours.read_values,
            "mlflow: values": lambda: ask("values"),
            "yard: search": ours.search,
            "mlflow: search": lambda: ask("search"),
        }
        results = interleave(cases, given.rounds, warmups=2)
    rows = [[name, *(f"{value:,.1f}" for value in spread(values))] for name, values in results.items()]
    table("milliseconds", ("call", "median", "min", "max"), rows)
    return conclude("metrics_query", bars(results, given.points, given.runs, given.peer_share))


if __name__ == "__main__":
    raise SystemExit(main())
