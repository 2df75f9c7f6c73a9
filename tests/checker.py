"""Compares what workers sent, as their diaries tell, with what is stored, as the public API tells.

Shares no code with the services: stubs made from the contracts, and the diary of `tests/faults/trainer/evidence.py`.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import grpc
import numpy as np
from numpy.typing import NDArray
from trainyard_protos.v1 import artifacts_pb2, artifacts_pb2_grpc, metrics_pb2, metrics_pb2_grpc

from scripts.testbed.patience import PATIENCE_S
from tests.faults.trainer import evidence
from tests.faults.trainer.evidence import Told

_OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.enable_http_proxy", 0))
_SHOWN = 20

Bits = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class StoredSeries:
    """One name of one rank: points in the order in which they were answered."""

    name: str
    rank: int
    attempt: tuple[int, ...]
    step: tuple[int, ...]
    bits: Bits

    def of_attempt(self, attempt: int) -> dict[int, int]:
        """Bits by step."""
        points = zip(self.attempt, self.step, self.bits.tolist(), strict=True)
        return {step: bits for number, step, bits in points if number == attempt}


@dataclass(frozen=True, slots=True)
class Stored:
    """All that a yard keeps of one job.

    Attributes:
        hidden: series with what rewinds hid.
        stitched: series as a user sees them.
        lines: by attempt and rank, in the order in which they were answered; those of the evidence alone.
        checkpoints: (step, bytes) of every version.
        outputs: bytes of the final model, if it was stored.
    """

    hidden: Sequence[StoredSeries]
    stitched: Sequence[StoredSeries]
    lines: Mapping[tuple[int, int], Sequence[str]]
    checkpoints: Sequence[tuple[int, bytes]] = ()
    outputs: bytes | None = None


class Api:
    """The public API of a yard, with nothing of the client library between; under TLS with `ca_file`."""

    def __init__(self, endpoint: str, token: str, ca_file: Path | None = None) -> None:
        self._channel = (
            grpc.secure_channel(endpoint, grpc.ssl_channel_credentials(ca_file.read_bytes()), options=_OPTIONS)
            if ca_file
            else grpc.insecure_channel(endpoint, options=_OPTIONS)
        )
        self._metadata = (("authorization", f"Bearer {token}"),)
        self.metrics = metrics_pb2_grpc.MetricsServiceStub(self._channel)
        self.artifacts = artifacts_pb2_grpc.ArtifactServiceStub(self._channel)

    def __enter__(self) -> Api:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    @property
    def with_deadline(self) -> dict[str, object]:
        """Arguments of every call."""
        return {"metadata": self._metadata, "timeout": PATIENCE_S}

    def stored(self, job_id: str, output: str = "") -> Stored:
        """Everything about a job. `output`: the name of the artifact it makes at its end."""
        checkpoints = self.checkpoints(job_id)
        outputs = self.single_file(output) if output else None
        return replace(self.records(job_id), checkpoints=checkpoints, outputs=outputs)

    def records(self, job_id: str) -> Stored:
        """Points and lines of a job."""
        hidden, stitched = (list(self._series(job_id, hidden=hidden)) for hidden in (True, False))
        return Stored(hidden, stitched, self.lines(job_id))

    def count(self, job_id: str, name: str) -> int:
        """Points that are stored of a series, of all ranks together, without those that a rewind hid."""
        selector = metrics_pb2.SeriesSelector(workspace="default", job_id=job_id, names=[name])
        request = metrics_pb2.ListSeriesRequest(selector=selector)
        return sum(series.count for series in self.metrics.ListSeries(request, **self.with_deadline).series)

    def _series(self, job_id: str, *, hidden: bool) -> Iterator[StoredSeries]:
        for name in (*evidence.TRAIN_NAMES, *evidence.VALIDATION_NAMES):
            selector = metrics_pb2.SeriesSelector(
                workspace="default", job_id=job_id, names=[name], include_hidden=hidden
            )
            request = metrics_pb2.QuerySeriesRequest(selector=selector, max_points=0)
            for series in self.metrics.QuerySeries(request, **self.with_deadline).series:
                values = np.array(series.value, dtype="<f8").view("<u8")
                yield StoredSeries(series.name, series.rank, tuple(series.attempt), tuple(series.step), values)

    def lines(self, job_id: str) -> dict[tuple[int, int], list[str]]:
        """Lines of a job's evidence by attempt and rank."""
        found: dict[tuple[int, int], list[str]] = {}
        request = metrics_pb2.ReadLogsRequest(workspace="default", job_id=job_id)
        for page in self.metrics.ReadLogs(request, **self.with_deadline):
            for stored in page.lines:
                if stored.line.text.startswith(evidence.PREFIX):
                    found.setdefault((stored.attempt, stored.line.rank), []).append(stored.line.text)
        return found

    def checkpoints(self, job_id: str) -> list[tuple[int, bytes]]:
        """Step and bytes of every checkpoint of a job."""
        request = artifacts_pb2.ListVersionsRequest(
            workspace="default", kind="checkpoint", job_id=job_id, page_size=500
        )
        versions = self.artifacts.ListVersions(request, **self.with_deadline).versions
        return [(version.checkpoint.step, self.single_file(version.id)) for version in versions]

    def single_file(self, reference: str) -> bytes:
        """The bytes of a version that holds one file."""
        request = artifacts_pb2.GetVersionRequest(workspace="default", reference=reference)
        detail = self.artifacts.GetVersion(request, **self.with_deadline)
        (file,) = detail.manifest.files
        chunks = artifacts_pb2.GetChunksRequest(
            workspace="default", version_id=detail.version.id, hashes=[chunk.hash for chunk in file.chunks]
        )
        by_hash: dict[bytes, bytes] = {}
        for answer in self.artifacts.GetChunks(chunks, **self.with_deadline):
            by_hash |= {chunk.hash: chunk.data for chunk in (answer, *answer.more)}
        return b"".join(by_hash[chunk.hash] for chunk in file.chunks)


def stored_values(api: Api, run_id: str, names: Sequence[str]) -> dict[tuple[str, int], tuple[list[int], Bits]]:
    """Steps and bits of a single run's series by name and rank."""
    selector = metrics_pb2.SeriesSelector(workspace="default", run_id=run_id, names=names)
    answer = api.metrics.QuerySeries(metrics_pb2.QuerySeriesRequest(selector=selector), **api.with_deadline)
    return {
        (each.name, each.rank): (list(each.step), np.array(each.value, dtype="<f8").view("<u8"))
        for each in answer.series
    }


def differences(seed: int, told: Iterable[Told], stored: Stored, *, over: bool = True) -> list[str]:
    """What is missing, doubled, invented, changed or out of order, in words; empty when all is well.

    Args:
        over: the job has ended well, so that the newest checkpoint and the output must be there too.
    """
    diaries = list(told)
    check = _Check(seed, diaries)
    for worker in diaries:
        check.points(worker, stored.hidden)
        check.lines(worker, stored.lines.get((worker.attempt, worker.rank), ()))
    check.strangers(stored)
    check.stitched(stored.stitched)
    check.checkpoints(stored, over)
    return check.found


def assert_whole(api: Api, job_id: str, folder: Path, seed: int, output: str) -> None:
    """Fails with what differs between the diaries in `folder` and what the yard has of an ended job."""
    stored = api.stored(job_id, output)
    found = differences(seed, evidence.read_diaries(folder), stored)
    shown = "\n".join(found[:_SHOWN])
    assert not found, f"seed {seed}: {len(found)} differences between what was sent and what is stored:\n{shown}"


@dataclass
class _Check:
    seed: int
    diaries: Sequence[Told]
    found: list[str] = field(default_factory=list)

    def points(self, worker: Told, series: Sequence[StoredSeries]) -> None:
        """Every point of a worker is there once, with its bits, in order; and no other."""
        by_name = {each.name: each for each in series if each.rank == worker.rank}
        for name in (*evidence.TRAIN_NAMES, *evidence.VALIDATION_NAMES):
            who = f"attempt {worker.attempt} rank {worker.rank} {name}"
            expected = [step for step in worker.steps if _logs(name, step)]
            certain = {step for step in worker.certain if _logs(name, step)}
            found = by_name.get(name)
            steps = [] if found is None else _steps(found, worker.attempt)
            self._same(who, expected, certain, steps)
            if found is not None:
                self._bits(who, found, worker.attempt)

    def lines(self, worker: Told, lines: Sequence[str]) -> None:
        """Every line of a worker is there once, in order."""
        who = f"attempt {worker.attempt} rank {worker.rank} line"
        texts = {
            evidence.line(self.seed, worker.attempt, worker.rank, step): step
            for step in worker.steps
            if step % evidence.PRINT_EVERY == 0
        }
        self.found += [f"{who} invented: {text!r}" for text in lines if text not in texts]
        steps = [texts[text] for text in lines if text in texts]
        certain = set(texts.values()).intersection(worker.certain)
        self._same(who, list(texts.values()), certain, steps)

    def strangers(self, stored: Stored) -> None:
        """Nobody logged but those who kept a diary."""
        known = {(worker.attempt, worker.rank) for worker in self.diaries}
        for series in stored.hidden:
            for attempt in set(series.attempt):
                if (attempt, series.rank) not in known:
                    self.found.append(f"attempt {attempt} rank {series.rank} {series.name}: invented, it kept no diary")
        self.found += [
            f"lines of {worker}: invented, it kept no diary" for worker in stored.lines if worker not in known
        ]

    def stitched(self, series: Sequence[StoredSeries]) -> None:
        """However often it was retried, each step is there once, in order, and none is missing."""
        last = {rank: max(worker.certain, default=0) for rank, worker in self._last_attempts().items()}
        seen = set()
        for each in series:
            seen.add((each.name, each.rank))
            expected = [step for step in range(1, last.get(each.rank, 0) + 1) if _logs(each.name, step)]
            self._same(f"stitched rank {each.rank} {each.name}", expected, set(expected), list(each.step))
            if list(each.attempt) != sorted(each.attempt):
                self.found.append(f"stitched rank {each.rank} {each.name}: attempts are mixed")
            for attempt in sorted(set(each.attempt)):
                self._bits(f"stitched attempt {attempt} rank {each.rank} {each.name}", each, attempt)
        for rank in last:
            for name in (*evidence.TRAIN_NAMES, *evidence.VALIDATION_NAMES):
                if (name, rank) not in seen:
                    self.found.append(f"stitched rank {rank} {name}: no such series")

    def checkpoints(self, stored: Stored, over: bool) -> None:
        """Every version holds the bytes of its step; the newest one and the output are stored."""
        final = max((max(worker.certain, default=0) for worker in self._last_attempts().values()), default=0)
        for step, data in stored.checkpoints:
            if data != evidence.weights(self.seed, step):
                self.found.append(f"checkpoint of step {step}: {len(data)} bytes that nobody saved")
        if over and final not in [step for step, _ in stored.checkpoints]:
            self.found.append(f"checkpoint of step {final}: missing")
        if over and stored.outputs != evidence.weights(self.seed, final):
            self.found.append(f"the output is not the one of step {final}")

    def _last_attempts(self) -> dict[int, Told]:
        return {worker.rank: worker for worker in sorted(self.diaries, key=lambda worker: worker.attempt)}

    def _same(self, who: str, expected: Sequence[int], certain: set[int], steps: Sequence[int]) -> None:
        counts = Counter(steps)
        self.found += [f"{who}: step {step} missing" for step in sorted(certain - counts.keys())]
        self.found += [f"{who}: step {step} invented" for step in sorted(counts.keys() - set(expected))]
        self.found += [f"{who}: step {step} {times} times" for step, times in counts.items() if times > 1]
        if list(steps) != sorted(steps):
            self.found.append(f"{who}: out of order")

    def _bits(self, who: str, series: StoredSeries, attempt: int) -> None:
        for step, bits in series.of_attempt(attempt).items():
            value = _value(self.seed, attempt, series.rank, series.name, step)
            if value != bits:
                self.found.append(f"{who}: step {step} is {bits:#018x} instead of {value:#018x}")


def _steps(series: StoredSeries, attempt: int) -> list[int]:
    return [step for number, step in zip(series.attempt, series.step, strict=True) if number == attempt]


def _logs(name: str, step: int) -> bool:
    return name in evidence.TRAIN_NAMES or step % evidence.VALIDATE_EVERY == 0


def _value(seed: int, attempt: int, rank: int, name: str, step: int) -> int:
    of_training = name in evidence.TRAIN_NAMES
    names = evidence.TRAIN_NAMES if of_training else evidence.VALIDATION_NAMES
    return _row(seed, attempt, rank, step, of_training)[names.index(name)]


@lru_cache(maxsize=400_000)
def _row(seed: int, attempt: int, rank: int, step: int, of_training: bool) -> tuple[int, ...]:
    """The bits of a row; every one of them is asked for many times."""
    values = (evidence.train_values if of_training else evidence.validation_values)(seed, attempt, rank, step)
    return struct.unpack(f"<{len(values)}Q", struct.pack(f"<{len(values)}d", *values))
