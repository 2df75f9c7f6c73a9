"""How the metrics ingestor is put together, alone or in the yard of one machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from prometheus_client import CollectorRegistry
from servicekit.settings import from_environment

from trainyard_metrics.app import Metrics
from trainyard_metrics.settings import Settings


def compose(
    *, home: Path, database_url: str, registry: CollectorRegistry, environ: Mapping[str, str], read_only: bool = False
) -> Metrics:
    """The service, with `TRAINYARD_METRICS_*` of the environment as its settings.

    Raises:
        ValueError: a setting is wrong.
    """
    settings = from_environment(Settings, "TRAINYARD_METRICS", environ)
    return Metrics(home=home, database_url=database_url, settings=settings, registry=registry, read_only=read_only)
