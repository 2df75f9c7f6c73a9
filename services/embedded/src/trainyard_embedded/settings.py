"""How a yard on one machine runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from servicekit.server import Tls


@dataclass(frozen=True, kw_only=True)
class YardSettings:
    """Options of one yard.

    Args:
        home: folder with everything it keeps.
        host: address to listen on; beyond loopback needs `tls`.
        port: 0 takes the port of the last time when it is free, else any free one.
        ephemeral: ends by itself when no client is attached and no job is active; its work never outlives it.
        read_only: answers what commands read while no yard is up (`trainyard_embedded.reading`); nothing else counts.
        metrics_port: serve Prometheus metrics on this port of `host`; 0: not at all.
    """

    home: Path
    host: str = "127.0.0.1"
    port: int = 0
    ephemeral: bool = False
    read_only: bool = False
    tls: Tls | None = None
    tls_ca: Path | None = None
    metrics_port: int = 0
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
