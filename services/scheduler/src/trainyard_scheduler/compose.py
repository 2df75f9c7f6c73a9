"""How the scheduler is put together, alone or in the yard of one machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from servicekit.settings import from_environment

from trainyard_scheduler.app import Scheduler
from trainyard_scheduler.settings import Settings

if TYPE_CHECKING:
    from celery import Celery


def compose(
    *, home: Path, database_url: str, celery: Celery | None, registry: CollectorRegistry, environ: Mapping[str, str]
) -> Scheduler:
    """The service, which only reads without `celery`, with `TRAINYARD_SCHEDULER_*` of the environment as its settings.

    Raises:
        ValueError: a setting is wrong.
    """
    settings = from_environment(Settings, "TRAINYARD_SCHEDULER", environ)
    return Scheduler(home=home, database_url=database_url, celery=celery, settings=settings, registry=registry)
