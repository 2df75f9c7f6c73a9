"""An S3 server: versitygw over a folder."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from scripts.testbed import fetch
from scripts.testbed.server import Server

REGION = "us-east-1"


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket and how to reach it."""

    endpoint: str
    access_key: str
    secret_key: str
    name: str
    region: str = REGION


class S3(Server):
    """Buckets are folders below `objects`."""

    name = "s3"

    def __init__(self, folder: Path, port: int = 0) -> None:
        super().__init__(folder, port)
        self.access_key = secrets.token_hex(10)
        self.secret_key = secrets.token_urlsafe(30)
        self.objects = folder / "objects"
        self._program = fetch.versitygw()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def prepare(self) -> None:
        self.objects.mkdir(exist_ok=True)

    def command(self) -> list[str]:
        address = f"127.0.0.1:{self.port}"
        return [str(self._program.path), "--port", address, "--region", REGION, "posix", str(self.objects)]

    def environ(self) -> Mapping[str, str]:
        return {"ROOT_ACCESS_KEY": self.access_key, "ROOT_SECRET_KEY": self.secret_key}

    def bucket(self, name: str) -> Bucket:
        """A bucket, made when it is not there."""
        (self.objects / name).mkdir(parents=True, exist_ok=True)
        return Bucket(self.endpoint, self.access_key, self.secret_key, name)
