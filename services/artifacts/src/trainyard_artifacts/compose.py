"""How the artifact store is put together, alone or in the yard of one machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from prometheus_client import CollectorRegistry
from servicekit.settings import from_environment

from trainyard_artifacts.app import Artifacts
from trainyard_artifacts.settings import Settings


def compose(
    *, home: Path, database_url: str, registry: CollectorRegistry, environ: Mapping[str, str], read_only: bool = False
) -> Artifacts:
    """The service, with `TRAINYARD_ARTIFACTS_*` of the environment as its settings.

    Raises:
        ValueError: a setting is wrong.
    """
    settings = from_environment(Settings, "TRAINYARD_ARTIFACTS", environ)
    return Artifacts(home=home, database_url=database_url, settings=settings, registry=registry, read_only=read_only)
