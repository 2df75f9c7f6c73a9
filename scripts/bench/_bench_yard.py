"""A yard in a home of its own, for the length of a benchmark."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
from _harness import clean_environment
from trainyard.home import YardFile, read_endpoint, token
from trainyard_protos.v1.metrics_pb2_grpc import MetricsServiceStub

YARD = Path(sys.executable).with_name("yard")
_MESSAGE_BYTES = 256 * 1024 * 1024


class BenchYard:
    """Where the yard is, and how to talk to it."""

    def __init__(self, home: Path) -> None:
        self.home = home

    @property
    def file(self) -> YardFile:
        found = read_endpoint(self.home)
        if found is None:
            raise RuntimeError(f"the yard in {self.home} is gone; {self.home / 'yard.log'} tells why")
        return found

    @property
    def environment(self) -> dict[str, str]:
        return clean_environment(TRAINYARD_HOME=str(self.home))

    @property
    def token(self) -> str:
        return token(self.home)

    @contextlib.contextmanager
    def metrics(self) -> Iterator[Any]:
        """A stub of the metrics service that carries the user's token; calls take `metadata=yard.metadata`."""
        options = [("grpc.max_receive_message_length", _MESSAGE_BYTES)]
        with grpc.insecure_channel(self.file.endpoint, options=options) as channel:
            yield MetricsServiceStub(channel)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.token}"),)


@contextlib.contextmanager
def bench_yard(folder: Path) -> Iterator[BenchYard]:
    """A yard with its home in `folder`; it ends with the block."""
    yard = BenchYard(folder / "home")
    subprocess.run([YARD, "up"], env=yard.environment, check=True, stdout=subprocess.DEVNULL)
    try:
        yield yard
    finally:
        subprocess.run([YARD, "down", "--yes"], env=yard.environment, check=True, stdout=subprocess.DEVNULL)
