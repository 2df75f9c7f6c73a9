"""Jobs a second through the whole yard, its memory per active job, and how soon a stop behind many starts takes effect.

The yard is the real one on durable SQLite, in a process of its own; only its backend pretends to run (`_pretend.py`).
The peer is a plain task queue on durable SQLite: no admission, no attempts, no events, no watching.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from _harness import Bar, clean_environment, conclude, interleave, progress, table
from _peers import environment
from trainyard.client import Client, JobHandle
from trainyard_protos.v1 import scheduler_pb2

CHUNK = 500
HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Load:
    """What many active jobs cost the yard."""

    bytes_per_job: float
    stop_s: float


@dataclass(frozen=True, slots=True)
class RunningYard:
    client: Client
    process: psutil.Process


@contextlib.contextmanager
def pretending_yard() -> Iterator[RunningYard]:
    """A fresh yard with the pretending backend, and a client of it."""
    with tempfile.TemporaryDirectory(prefix="yard-bench-") as home:
        ready, said = os.pipe()
        command = [sys.executable, str(HERE / "_pretend.py"), "--home", home, "--ready-fd", str(said)]
        with (Path(home) / "yard.log").open("wb") as log:
            process = subprocess.Popen(command, pass_fds=[said], env=clean_environment(), stdout=log, stderr=log)
        os.close(said)
        try:
            with os.fdopen(ready) as pipe:
                answer = json.loads(pipe.readline() or "{}")
            if not answer:
                raise RuntimeError(f"the yard did not start:\n{(Path(home) / 'yard.log').read_text()}")
            with Client(answer["endpoint"], token=answer["token"]) as client:
                yield RunningYard(client, psutil.Process(process.pid))
        finally:
            process.terminate()
            process.wait(60)


def document(command: str) -> str:
    spec = {"runtime": "process", "command": [command], "resources": {"cpu": "100m", "memory": "64Mi"}}
    job = {"apiVersion": "trainyard.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "no-op"}, "spec": spec}
    return json.dumps(job)


def submit(client: Client, command: str, count: int) -> list[JobHandle]:
    """Submits jobs in batches.

    Raises:
        YardError: one was refused.
    """
    handles: list[JobHandle] = []
    for first in range(0, count, CHUNK):
        for answer in client.submit_batch([document(command)] * min(CHUNK, count - first)):
            if not isinstance(answer, JobHandle):
                raise answer
            handles.append(answer)
    return handles


def await_events(client: Client, kind: str, jobs: Sequence[JobHandle]) -> None:
    """Returns when every one of the jobs has had an event of this type.

    Raises:
        RuntimeError: one of them failed.
    """
    missing = {job.id for job in jobs}
    for event in client.watch():
        if event.type == "Failed":
            raise RuntimeError(f"job {event.object_id} failed: {event.reason}: {event.message}")
        if event.type == kind:
            missing.discard(event.object_id)
        if not missing:
            return


def time_yard(count: int) -> float:
    """Jobs a second from the first submission to the last success."""
    with pretending_yard() as yard:
        await_events(yard.client, "Succeeded", submit(yard.client, "end", 100))
        started = time.monotonic()
        await_events(yard.client, "Succeeded", submit(yard.client, "end", count))
        return count / (time.monotonic() - started)


def time_peer(count: int) -> float:
    """Tasks a second of Huey."""
    with tempfile.TemporaryDirectory(prefix="yard-bench-") as folder:
        command = [str(environment() / "python"), str(HERE / "_huey_peer.py"), str(count), folder]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=clean_environment(), timeout=600)
        return count / float(json.loads(done.stdout.splitlines()[-1])["seconds"])


def load(count: int) -> Load:
    """Memory with `count` active jobs, and a stop that is issued while most of their starts still lie before it."""
    with pretending_yard() as yard:
        await_events(yard.client, "Succeeded", submit(yard.client, "end", 500))
        [running] = submit(yard.client, "wait", 1)
        await_events(yard.client, "Claimed", [running])
        before = yard.process.memory_info().rss
        jobs = submit(yard.client, "wait", count)
        started = time.monotonic()
        running.cancel()
        running.wait(60, check=False)
        stop_s = time.monotonic() - started
        assert running.status().state == scheduler_pb2.JOB_STATE_CANCELLED
        await_events(yard.client, "Claimed", jobs)
        return Load((yard.process.memory_info().rss - before) / count, stop_s)


def report(yard: Sequence[float], peer: Sequence[float], loads: Sequence[Load]) -> int:
    megabytes = [each.bytes_per_job / 1e6 for each in loads]
    stops = [each.stop_s for each in loads]
    rows = [
        ("yard, jobs/s", *(f"{value:.0f}" for value in (statistics.median(yard), min(yard), max(yard)))),
        ("Huey, tasks/s", *(f"{value:.0f}" for value in (statistics.median(peer), min(peer), max(peer)))),
        ("MB per active job", *(f"{value:.4f}" for value in (statistics.median(megabytes), *_ends(megabytes)))),
        ("stop behind starts, s", *(f"{value:.3f}" for value in (statistics.median(stops), *_ends(stops)))),
    ]
    table("no-op jobs through the yard", ("", "median", "min", "max"), rows)
    rate, tasks = statistics.median(yard), statistics.median(peer)
    limits = [("memory per active job", statistics.median(megabytes), 0.5, "MB"), ("stop", max(stops), 1.0, "s")]
    return conclude(
        "job_throughput",
        [
            Bar(name="jobs", ours=rate, peer=tasks, peer_name="Huey", unit="1/s", bar=200, higher_is_better=True),
            *(
                Bar(name=name, ours=ours, peer=limit, peer_name="the limit", unit=unit, bar=limit)
                for name, ours, limit, unit in limits
            ),
        ],
    )


def _ends(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    count = arguments.jobs
    speeds = interleave({"yard": lambda: time_yard(count), "Huey": lambda: time_peer(count)}, arguments.rounds, 0)
    loads = []
    for number in range(arguments.rounds):
        progress(f"active jobs: round {number + 1}")
        loads.append(load(count))
    return report(speeds["yard"], speeds["Huey"], loads)


if __name__ == "__main__":
    sys.exit(main())
