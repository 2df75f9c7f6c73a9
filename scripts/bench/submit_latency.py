"""How long from a command to the first output line of the job it starts.

The clock is the job's own: its first line says when it was printed. `shown` is when that line came out of the command.
Yard, torchx, Ray and the bare process run alternately, on the same cores, the same no-op.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from _harness import Bar, clean_environment, conclude, interleave, spread, table
from _peers import environment, ray_cluster, ray_environment
from trainyard.client import Client
from trainyard.home import read_endpoint

BIN = Path(sys.executable).parent
NO_OP = "import time; print('first-line', time.time(), flush=True)"
FIRST_LINE = re.compile(r"first-line (\d+\.\d+)")
TIMEOUT_S = 120


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds from the command to its job's first line."""

    printed: float
    shown: float | None = None


def document(runtime: str) -> str:
    """The no-op as a job, without code or checkpoints."""
    command = ["python", "-c", NO_OP]
    spec = {"runtime": runtime, "command": command, "resources": {"cpu": "100m", "memory": "64Mi"}}
    job = {"apiVersion": "trainyard.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "no-op"}, "spec": spec}
    return json.dumps(job)


def time_command(command: Sequence[str], env: Mapping[str, str], folder: Path) -> Timing:
    """Runs a command to its end.

    Raises:
        RuntimeError: it failed, took more than two minutes, or its job's line never came.
    """
    started = time.time()
    with subprocess.Popen(
        command, env=env, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        watchdog = threading.Timer(TIMEOUT_S, process.kill)
        watchdog.start()
        assert process.stdout is not None
        lines = [(line, time.time()) for line in process.stdout]
        code = process.wait()
        watchdog.cancel()
    output = "".join(line for line, _ in lines)
    if code != 0:
        raise RuntimeError(f"{shlex.join(command)} ended with code {code}:\n{output}")
    shown = next((at for line, at in lines if FIRST_LINE.search(line)), started)
    return Timing((printed_at(output) - started) * 1000, (shown - started) * 1000)


def printed_at(output: str) -> float:
    """The job's own clock, out of whatever was printed around it.

    Raises:
        RuntimeError: it is not there.
    """
    found = FIRST_LINE.search(output)
    if found is None:
        raise RuntimeError(f"the job's first line is missing in:\n{output}")
    return float(found[1])


class Yards:
    """`yard` commands on homes of their own: one with a yard that is up, one without."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.warm, self.cold = folder / "warm", folder / "cold"
        self.files = {runtime: folder / f"{runtime}.json" for runtime in ("process", "torchrun")}
        for runtime, file in self.files.items():
            file.write_text(document(runtime))

    @contextlib.contextmanager
    def up(self) -> Iterator[None]:
        """The yard in `warm` for the length of the block."""
        self._yard(self.warm, "up")
        try:
            yield
        finally:
            self._yard(self.warm, "down", "--yes")

    def run_warm(self, runtime: str) -> Timing:
        return time_command(self._run(runtime), self.env(self.warm), self.folder)

    def run_cold(self) -> Timing:
        timing = time_command(self._run("process"), self.env(self.cold), self.folder)
        self._await_end(self.cold)
        return timing

    def run_first(self) -> Timing:
        """A home that never had a yard: keys, token and databases are made too."""
        home = Path(tempfile.mkdtemp(dir=self.folder))
        timing = time_command(self._run("process"), self.env(home), self.folder)
        self._await_end(home)
        return timing

    def env(self, home: Path) -> dict[str, str]:
        return clean_environment(TRAINYARD_HOME=str(home))

    def _run(self, runtime: str) -> list[str]:
        return [str(BIN / "yard"), "run", str(self.files[runtime])]

    def _yard(self, home: Path, *arguments: str) -> None:
        subprocess.run([BIN / "yard", *arguments], env=self.env(home), check=True, stdout=subprocess.DEVNULL)

    def _await_end(self, home: Path) -> None:
        """The yard that `yard run` started may end a little later than the command: the next start is cold again."""
        yard = read_endpoint(home)
        if yard is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(yard.pid).wait(TIMEOUT_S)


def time_client(client: Client, job: str) -> Timing:
    """`Client.submit` from a client that is connected."""
    started = time.time()
    handle = client.submit(job)
    handle.wait(TIMEOUT_S)
    output = "\n".join(str(each.line.text) for each in handle.logs())
    return Timing((printed_at(output) - started) * 1000)


@contextlib.contextmanager
def ray_client(bin_folder: Path, address: str) -> Iterator[Callable[[], Timing]]:
    """A warm Ray client in a process of its own; what is yielded submits one job with it."""
    command = [str(bin_folder / "python"), str(Path(__file__).with_name("_ray_client.py")), address]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=ray_environment(), stdin=pipe, stdout=pipe, text=True, bufsize=1) as process:
        assert process.stdin is not None and process.stdout is not None
        stdin, stdout = process.stdin, process.stdout
        stdout.readline()

        def submit() -> Timing:
            stdin.write(shlex.join(no_op()) + "\n")
            answer = json.loads(stdout.readline())
            return Timing((printed_at(answer["output"]) - answer["started"]) * 1000)

        try:
            yield submit
        finally:
            stdin.close()


def no_op() -> list[str]:
    """The bare process."""
    return [str(BIN / "python"), "-c", NO_OP]


def peer_cases(peers: Path, ray_address: str, folder: Path) -> dict[str, Callable[[], Timing]]:
    """What others take for the same no-op."""
    torchrun = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "1", "--no-python", *no_op()]
    torchx = [str(peers / "torchx"), "run", "-s", "local_cwd", "utils.python", "-c", NO_OP]
    ray = [str(peers / "ray"), "job", "submit", "--address", ray_address, "--", *no_op()]
    env = clean_environment()
    return {
        "bare process": lambda: time_command(no_op(), env, folder),
        "torchx run -s local_cwd": lambda: time_command(torchx, env, folder),
        "ray job submit": lambda: time_command(ray, ray_environment(), folder),
        "torchrun --standalone": lambda: time_command(torchrun, env, folder),
    }


def measure(rounds: int, folder: Path) -> dict[str, list[Timing]]:
    yards, peers = Yards(folder), environment()
    with contextlib.ExitStack() as stack:
        ray_address = stack.enter_context(ray_cluster(peers))
        ray = stack.enter_context(ray_client(peers, ray_address))
        stack.enter_context(yards.up())
        warm = read_endpoint(yards.warm)
        assert warm is not None
        token = (yards.warm / "token").read_text().strip()
        client = stack.enter_context(Client(warm.endpoint, token=token))
        cases = peer_cases(peers, ray_address, folder) | {
            "Ray client, warm": ray,
            "yard run": lambda: yards.run_warm("process"),
            "Client.submit, warm": lambda: time_client(client, document("process")),
            "yard run, no yard up": yards.run_cold,
            "yard run, first ever": yards.run_first,
            "yard run, torchrun": lambda: yards.run_warm("torchrun"),
        }
        return interleave(cases, rounds)


def report(results: Mapping[str, Sequence[Timing]]) -> int:
    medians = {name: statistics.median(timing.printed for timing in timings) for name, timings in results.items()}
    bare = medians["bare process"]
    rows = []
    for name, timings in results.items():
        median, low, high = spread([timing.printed for timing in timings])
        shown = [timing.shown for timing in timings if timing.shown is not None]
        columns = [median, low, high, median - bare, *([statistics.median(shown)] if shown else [])]
        rows.append([name, *(f"{value:.0f}" for value in columns), *([] if shown else ["-"])])
    table("to the job's first line, ms", ("", "median", "min", "max", "over bare", "shown"), rows)

    def over(name: str) -> float:
        return medians[name] - bare

    torchx, ray = "torchx run -s local_cwd", "Ray client, warm"
    bars = [("yard run", torchx, 250), ("Client.submit, warm", ray, 100), ("yard run, no yard up", torchx, 1500)]
    torchrun = medians["torchrun --standalone"]
    return conclude(
        "submit_latency",
        [
            *(
                Bar(name=f"{ours} over bare", ours=over(ours), peer=over(peer), peer_name=peer, unit="ms", bar=limit)
                for ours, peer, limit in bars
            ),
            Bar(
                name="torchrun job",
                ours=medians["yard run, torchrun"],
                peer=torchrun,
                peer_name="torchrun --standalone",
                unit="ms",
                bar=torchrun,
            ),
        ],
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory(prefix="yard-bench-") as folder:
        return report(measure(rounds, Path(folder)))


if __name__ == "__main__":
    sys.exit(main())
