"""A job of eight writers on a yard, its lag watched from outside, and every point counted afterwards."""

from __future__ import annotations

import bisect
import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
from _bench_yard import BenchYard
from _ingest_writer import DIFFERENT_ROWS, NAMES, table
from trainyard import Client
from trainyard.tracker.reading import read_header
from trainyard_protos.v1 import metrics_pb2

WRITERS = 8
LOOKS_PER_S = 20
STEPS_PER_QUERY = 50_000
PATIENCE_S = 300
# Eight interpreters and the agent start meanwhile.
START_S = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ingest:
    """What one job showed.

    Attributes:
        points_per_s: logged by all writers, from the first row to the last acknowledgement.
        lags_s: at random moments, the age of the oldest row of a writer that was not acknowledged.
        late_s: how long the slowest writer took beyond its time.
        cpu: CPU seconds per second by who used them.
        most_bytes: the most memory a process had.
        run_id: where the points are.
        rows: of each writer.
    """

    points_per_s: float
    lags_s: list[float]
    late_s: float
    cpu: Mapping[str, float]
    most_bytes: Mapping[str, int]
    run_id: str
    rows: int

    @property
    def points(self) -> int:
        """Logged by all writers."""
        return self.rows * WRITERS * len(NAMES)

    @property
    def lag_p99_s(self) -> float:
        return float(np.quantile(self.lags_s, 0.99))


def ingest(yard: BenchYard, folder: Path, points_per_s: float, duration_s: float) -> Ingest:
    """Runs the writers at this rate for so long, and until everything is acknowledged."""
    folder.mkdir(parents=True)
    rows_per_s = points_per_s / WRITERS / len(NAMES)
    rows = int(rows_per_s * duration_s)
    before = set((yard.home / "attempts").glob("*"))
    with Client(yard.file.endpoint, token=yard.token) as client:
        job = client.submit(_document(folder, rows_per_s, rows))
        attempt = _wait_for(lambda: next(iter(set((yard.home / "attempts").glob("*")) - before), None))
        node = attempt / "node-0"
        pids = {"yard": yard.file.pid, "agent": _wait_for(lambda: _pid(node / "started"))}
        used = _Used({name: psutil.Process(pid) for name, pid in pids.items()})
        positions = _watch(yard, attempt.name, node / "tracker", rows, used.look)
        job.wait(PATIENCE_S)
    reports = [json.loads(path.read_bytes()) for path in sorted(folder.glob("rank-*.json"))]
    assert len(reports) == WRITERS, f"only {len(reports)} writers left a report; see {attempt}"
    written_s = sum(report["cpu_s"] for report in reports)
    marks = {report["rank"]: report["marks"] for report in reports}
    began_ns = min(marks[rank][0][1] for rank in marks)
    ended_ns = max(at_ns for at_ns, _, _ in positions)
    return Ingest(
        points_per_s=rows * WRITERS * len(NAMES) / ((ended_ns - began_ns) / 1e9),
        lags_s=[_lag_s(marks[rank], at_ns, position) for at_ns, rank, position in positions],
        late_s=max(report["late_s"] for report in reports),
        cpu={name: used_s / duration_s for name, used_s in {**used.cpu_s, "writers": written_s}.items()},
        most_bytes=used.most_bytes,
        run_id=attempt.name,
        rows=rows,
    )


def _document(folder: Path, rows_per_s: float, rows: int) -> str:
    writer = Path(__file__).with_name("_ingest_writer.py")
    spec = {
        "runtime": "torchrun",
        "command": [sys.executable, str(writer), str(rows_per_s), str(rows), str(time.time() + START_S), str(folder)],
        "workersPerNode": WRITERS,
        "resources": {"cpu": "100m", "memory": "100Mi"},
    }
    document = {"apiVersion": "trainyard.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "ingest"}}
    return json.dumps({**document, "spec": spec})


def _watch(
    yard: BenchYard, run_id: str, folder: Path, rows: int, each: Callable[[], None]
) -> list[tuple[int, int, int]]:
    """Asks until all rows are acknowledged: (time in ns, rank, acknowledged rows), writer after writer in turn."""
    _wait_for(lambda: len(_writers(folder)) == WRITERS)
    writers = sorted(_writers(folder).items())
    found: list[tuple[int, int, int]] = []
    complete: set[int] = set()
    pause = threading.Event()
    with yard.metrics() as metrics:
        while len(complete) < WRITERS:
            rank, writer_id = writers[len(found) % WRITERS]
            at_ns = time.time_ns()
            position = _position(yard, metrics, run_id, writer_id)
            found.append((at_ns, rank, position))
            if position == rows:
                complete.add(rank)
            each()
            pause.wait(1 / LOOKS_PER_S)
    return found


def _position(yard: BenchYard, metrics: Any, run_id: str, writer_id: str) -> int:
    request = metrics_pb2.GetPositionRequest(run_id=run_id, writer_id=writer_id)
    try:
        return int(metrics.GetPosition(request, metadata=yard.metadata, timeout=30).next_seq)
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.NOT_FOUND:  # the run is opened at this moment
            return 0
        raise


def _writers(folder: Path) -> dict[int, str]:
    """Ids of the writers by rank."""
    found = {}
    for path in folder.glob("*.log"):
        try:
            found[read_header(path).rank] = path.name.partition(".")[0]
        except (ValueError, FileNotFoundError):
            continue  # just being made, or already given back
    return found


def _lag_s(marks: list[tuple[int, int]], at_ns: int, position: int) -> float:
    """How old the first row that was not acknowledged was at that time."""
    place = bisect.bisect_right(marks, position, key=lambda mark: mark[0])
    logged_ns = marks[place][1] if place < len(marks) else at_ns
    return max(0.0, (at_ns - logged_ns) / 1e9)


class _Used:
    """CPU seconds that processes have used since they were first looked at, and the most memory they had."""

    def __init__(self, processes: Mapping[str, psutil.Process]) -> None:
        self._processes = processes
        self._before = {name: _cpu_s(process) for name, process in processes.items()}
        self.cpu_s = dict.fromkeys(processes, 0.0)
        self.most_bytes = dict.fromkeys(processes, 0)

    def look(self) -> None:
        for name, process in self._processes.items():
            with contextlib.suppress(psutil.NoSuchProcess):  # an agent ends when everything is acknowledged
                self.cpu_s[name] = _cpu_s(process) - self._before[name]
                self.most_bytes[name] = max(self.most_bytes[name], process.memory_info().rss)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _pid(started: Path) -> int | None:
    try:
        return int(json.loads(started.read_bytes())["pid"])
    except (FileNotFoundError, ValueError):
        return None


def _wait_for(look: Any) -> Any:
    """What `look` finds, as soon as there is something."""
    pause = threading.Event()
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if found := look():
            return found
        pause.wait(0.02)
    raise TimeoutError("the job did not start within a minute")


def count(yard: BenchYard, result: Ingest) -> int:
    """Reads every point of a run and compares it with what was logged; how many are stored, each once and unchanged."""
    tables = {rank: table(rank) for rank in range(WRITERS)}
    expected = {
        (rank, name): np.array([row[name] for row in tables[rank]]) for rank in range(WRITERS) for name in NAMES
    }
    right = 0
    with yard.metrics() as metrics:
        for name in NAMES:
            for rank, steps, values in _read(yard, metrics, result, name):
                right += int(np.sum(values == expected[rank, name][steps % DIFFERENT_ROWS]))
    return right


def _read(yard: BenchYard, metrics: Any, result: Ingest, name: str) -> Iterator[tuple[int, Any, Any]]:
    """Rank, steps and values, stretch by stretch; steps are those of the stretch, each once."""
    for first in range(0, result.rows, STEPS_PER_QUERY):
        last = min(first + STEPS_PER_QUERY, result.rows) - 1
        selector = metrics_pb2.SeriesSelector(run_id=result.run_id, names=[name])
        request = metrics_pb2.QuerySeriesRequest(selector=selector, from_step=first, to_step=last)
        answer = metrics.QuerySeries(request, metadata=yard.metadata, timeout=120)
        for series in answer.series:
            steps = np.array(series.step)
            if np.array_equal(steps, np.arange(first, last + 1)):
                yield series.rank, steps, np.array(series.value)
