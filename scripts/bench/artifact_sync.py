"""How fast trees of files get into the artifact store, and how little of them when most is there already.

One large file and many small ones, through the public protocol to a real yard on the same machine, each byte durable
before it is acknowledged; beside mlflow's server, which takes whole files, and beside a plain copy that is hashed and
forced to the disk. Then a second version with 5 % of its bytes changed, one with bytes put in at the front, and an
upload that is killed half way and made again: what is sent is counted where it enters the call. Content is random and
new in every round. All stay on two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
from _artifact_mlflow import Mlflow, mlflow_server
from _bench_yard import BenchYard, bench_yard
from _harness import Bar, clean_environment, conclude, interleave, progress, spread, table
from _peers import TRACKERS, environment
from blake3 import blake3
from trainyard.artifacts import FULL, download, upload
from trainyard.artifacts.allocator import keep_large_blocks
from trainyard.channel import connect
from trainyard_protos.v1 import artifacts_pb2 as pb
from trainyard_protos.v1.artifacts_pb2_grpc import ArtifactServiceStub

MIB = 1024 * 1024
LARGE_BYTES = 1024 * MIB
SMALL_FILES, SMALL_BYTES = 10_000, 10_000
RUN_BYTES = MIB
CHANGED = 0.05
FLOOR_FACTOR = 2.5
FILES_FACTOR = 5.0
CHANGED_BAR, INSERTED_BAR = 0.10, 0.02
KILL = Path(__file__).with_name("_artifact_kill.py")


class Counting:
    """The store's stub, which counts the bytes of chunks that are sent."""

    def __init__(self, stub: Any) -> None:
        self._stub = stub
        self.sent = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stub, name)

    def PutChunks(self, messages: AsyncIterator[pb.Chunk], **options: Any) -> Any:
        return self._stub.PutChunks(self._counted(messages), **options)

    async def _counted(self, messages: AsyncIterator[pb.Chunk]) -> AsyncIterator[pb.Chunk]:
        async for message in messages:
            self.sent += sum(len(chunk.data) for chunk in (message, *message.more))
            yield message


class Ours:
    """The yard, as this benchmark uses it.

    Attributes:
        cpu_s: what each of `put_large` took: the client's seconds in user code and in the kernel, then the yard's.
    """

    def __init__(self, yard: BenchYard) -> None:
        self._yard = yard
        self.cpu_s: list[tuple[float, ...]] = []

    def put_large(self, folder: Path) -> float:
        """Stores a folder; seconds."""
        before = self._cpu_s()
        seconds, _ = self.put(folder)
        self.cpu_s.append(tuple(after - was for after, was in zip(self._cpu_s(), before, strict=True)))
        return seconds

    def _cpu_s(self) -> tuple[float, ...]:
        ends = [psutil.Process().cpu_times(), psutil.Process(self._yard.file.pid).cpu_times()]
        return tuple(seconds for end in ends for seconds in (end.user, end.system))

    def put(self, folder: Path) -> tuple[float, int]:
        """Stores a folder as a version; seconds, and bytes sent."""
        return asyncio.run(self._put(folder))

    async def _put(self, folder: Path) -> tuple[float, int]:
        async with connect(self._yard.file.endpoint, self._yard.token) as channel:
            stub: Any = Counting(ArtifactServiceStub(channel))
            await channel.channel_ready()
            started = time.perf_counter()
            await upload(stub, folder, workspace="default", name="bench", kind="data")
            return time.perf_counter() - started, stub.sent

    def get(self, target: Path) -> float:
        """Fetches the newest version; seconds."""
        return asyncio.run(self._get(target))

    async def _get(self, target: Path) -> float:
        async with connect(self._yard.file.endpoint, self._yard.token) as channel:
            stub = ArtifactServiceStub(channel)
            await channel.channel_ready()
            started = time.perf_counter()
            await download(stub, "bench", target, workspace="default")
            return time.perf_counter() - started

    def killed(self, folder: Path, after_bytes: int) -> int:
        """An upload that is killed; how many bytes were stored by then."""
        command = [sys.executable, KILL, self._yard.file.endpoint, self._yard.token, folder, str(after_bytes)]
        done = subprocess.run(command, env=clean_environment(), stdout=subprocess.PIPE, text=True)
        return int(done.stdout)


class Bench:
    """What is measured, in a folder of its own."""

    def __init__(self, folder: Path, ours: Ours, mlflow: Mlflow, large_bytes: int, small_files: int) -> None:
        self._folder = folder
        self._ours = ours
        self._mlflow = mlflow
        self._large_bytes = large_bytes
        self._small_files = small_files

    def floor(self) -> float:
        """Seconds for a copy of the large file, hashed and forced to the disk."""
        with self._fresh("floor") as folder:
            source = large(folder, self._large_bytes)
            return copied(source, folder / "copy")

    def large(self, put: Callable[[Path], float]) -> float:
        """Seconds to store one large file."""
        with self._fresh("large") as folder:
            large(folder / "tree", self._large_bytes)
            return put(folder / "tree")

    def small(self, put: Callable[[Path], float]) -> float:
        """Small files stored a second."""
        with self._fresh("small") as folder:
            small(folder / "tree", self._small_files)
            return self._small_files / put(folder / "tree")

    def ours_put(self, folder: Path) -> float:
        return self._ours.put(folder)[0]

    def ours_put_large(self, folder: Path) -> float:
        return self._ours.put_large(folder)

    def peer_put(self, folder: Path) -> float:
        return self._mlflow.put(folder)[0]

    def there_and_back(self) -> tuple[float, float]:
        """Seconds to fetch one large file: ours and the peer's."""
        with self._fresh("back") as folder:
            large(folder / "tree", self._large_bytes)
            self._ours.put(folder / "tree")
            _, run = self._mlflow.put(folder / "tree")
            return self._ours.get(folder / "ours"), self._mlflow.get(run, folder / "peer")

    def versions(self) -> tuple[float, float, int]:
        """Shares of the bytes that are sent again after changes and after an insertion; bytes resent after a kill."""
        with self._fresh("versions") as folder:
            path = large(folder / "tree", self._large_bytes)
            half = self._ours.killed(folder / "tree", self._large_bytes // 2)
            resent = self._ours.put(folder / "tree")[1] - (self._large_bytes - half)
            change(path)
            changed = self._ours.put(folder / "tree")[1]
            content = path.read_bytes()
            path.write_bytes(os.urandom(1000) + content)
            inserted = self._ours.put(folder / "tree")[1]
        return changed / self._large_bytes, inserted / self._large_bytes, resent

    def _fresh(self, name: str) -> _Folder:
        return _Folder(Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self._folder)))


class _Folder:
    """A folder for the length of a block, whose writing is over before anything is measured in it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> Path:
        return self._path

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._path)


def large(folder: Path, size: int) -> Path:
    """One file of random bytes, on the disk."""
    folder.mkdir(exist_ok=True)
    path = folder / "model.bin"
    with path.open("wb") as file:
        for _ in range(0, size, 16 * MIB):
            file.write(os.urandom(16 * MIB))
    os.sync()
    return path


def small(folder: Path, count: int) -> None:
    """Many files of random bytes, a hundred a folder, on the disk."""
    for number in range(count):
        path = folder / f"{number // 100:04d}" / f"{number:06d}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(SMALL_BYTES))
    os.sync()


def change(path: Path) -> None:
    """Changes `CHANGED` of a file, in runs of `RUN_BYTES` at random places."""
    size = path.stat().st_size
    places = random.Random(1).sample(range(size // RUN_BYTES - 1), round(size * CHANGED / RUN_BYTES))
    with path.open("r+b") as file:
        for place in places:
            file.seek(place * RUN_BYTES + RUN_BYTES // 3)
            file.write(os.urandom(RUN_BYTES))


def copied(source: Path, target: Path) -> float:
    started = time.perf_counter()
    digest = blake3()
    buffer = memoryview(bytearray(8 * MIB))
    with source.open("rb", buffering=0) as read, target.open("wb", buffering=0) as write:
        while count := read.readinto(buffer):
            digest.update(buffer[:count])
            write.write(buffer[:count])
        os.fsync(write.fileno())
    digest.digest()
    return time.perf_counter() - started


def report(results: dict[str, list[float]], back: tuple[float, float], cpu_s: list[tuple[float, ...]]) -> None:
    rows = []
    for name, values in results.items():
        middle, least, most = spread(values)
        rows.append((name, f"{middle:.2f}", f"{least:.2f}", f"{most:.2f}"))
    rows.append(("fetch 1 GB: ours, s", f"{back[0]:.2f}", "", ""))
    rows.append(("fetch 1 GB: mlflow, s", f"{back[1]:.2f}", "", ""))
    table("artifacts", ("what", "median", "min", "max"), rows)
    client_user, client_system, yard_user, yard_system = map(statistics.median, zip(*cpu_s, strict=True))
    used = [
        ("client", f"{client_user:.2f}", f"{client_system:.2f}"),
        ("yard", f"{yard_user:.2f}", f"{yard_system:.2f}"),
    ]
    table("what storing the large file took, CPU s", ("", "user", "kernel"), used)


def bars(results: dict[str, list[float]], versions: tuple[float, float, int]) -> list[Bar]:
    floor, ours, peer, ours_small, peer_small = (statistics.median(values) for values in results.values())
    changed, inserted, resent = versions
    part = FULL.part_bytes / MIB
    everything = "mlflow: all of it"
    return [
        Bar(name="1 GB, over copy+BLAKE3+fsync", ours=ours, peer=floor, peer_name="floor", unit="s",
            bar=FLOOR_FACTOR * floor),
        Bar(name="1 GB, against mlflow", ours=ours, peer=peer, peer_name="mlflow", unit="s", bar=peer),
        Bar(name="10 KB files", ours=ours_small, peer=peer_small, peer_name="mlflow", unit="files/s",
            bar=FILES_FACTOR * peer_small, higher_is_better=True),
        Bar(name="sent, 5 % changed", ours=changed, peer=1.0, peer_name=everything, unit="of 1", bar=CHANGED_BAR),
        Bar(name="sent, 1,000 bytes in front", ours=inserted, peer=1.0, peer_name=everything, unit="of 1",
            bar=INSERTED_BAR),
        Bar(name="resent after a kill half way", ours=resent / MIB, peer=LARGE_BYTES / 2 / MIB, peer_name=everything,
            unit="MiB", bar=part),
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a tenth of the bytes and files: shows that it works")
    arguments = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    keep_large_blocks()  # as the `yard` command does, which this process stands for
    scale = 8 if arguments.quick else 1
    bin_folder = environment(TRACKERS)
    with tempfile.TemporaryDirectory(prefix="artifacts-", dir=os.environ.get("BENCH_DIR")) as name:
        folder = Path(name)
        with bench_yard(folder) as yard, mlflow_server(bin_folder, folder / "mlflow") as mlflow:
            ours = Ours(yard)
            bench = Bench(folder, ours, mlflow, LARGE_BYTES // scale, SMALL_FILES // scale)
            cases: dict[str, Callable[[], float]] = {
                "1 GB: copy+BLAKE3+fsync, s": bench.floor,
                "1 GB: ours, s": lambda: bench.large(bench.ours_put_large),
                "1 GB: mlflow, s": lambda: bench.large(bench.peer_put),
                "10 KB files: ours, files/s": lambda: bench.small(bench.ours_put),
                "10 KB files: mlflow, files/s": lambda: bench.small(bench.peer_put),
            }
            results = interleave(cases, arguments.rounds, warmups=0 if arguments.quick else 1)
            progress("versions")
            versions = bench.versions()
            back = bench.there_and_back()
    report(results, back, ours.cpu_s)
    return conclude("artifact_sync", bars(results, versions))


if __name__ == "__main__":
    sys.exit(main())
