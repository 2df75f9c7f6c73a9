"""How the launcher and its backend are put together, alone or in the yard of one machine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from celery import Celery
from prometheus_client import CollectorRegistry
from servicekit.auth import AttemptTokens
from servicekit.settings import from_environment

from trainyard_launcher.app import Launcher
from trainyard_launcher.registration import launcher_id
from trainyard_launcher.settings import Settings

if TYPE_CHECKING:
    from trainyard_launcher.backend import Backend


def compose(
    *,
    home: Path,
    celery: Celery,
    endpoint: str,
    token: str,
    tokens: AttemptTokens,
    environ: Mapping[str, str],
    ca_file: Path | None = None,
    tied_to: tuple[int, int] = (0, 0),
    backend: Backend | None = None,
    registry: CollectorRegistry | None = None,
    registered: Callable[[bool], Awaitable[None]],
) -> Launcher:
    """The service, with `TRAINYARD_LAUNCHER_*` of the environment as its settings.

    Args:
        endpoint: `host:port` of the yard, for itself and its agents.
        ca_file: root certificate of that endpoint.
        tied_to: pid and start time of a process that nothing started here may outlive.
        backend: where nodes run; as the settings say, when there is none.
        registry: where its numbers are shown.
        registered: told whether the scheduler takes this launcher's pool.

    Raises:
        ValueError: a setting is wrong.
    """
    changes: dict[str, object] = {"tied_to_pid": tied_to[0], "tied_to_start_time": tied_to[1]} if tied_to[0] else {}
    if ca_file is not None:
        changes["ca_file"] = str(ca_file)
    settings = from_environment(Settings, "TRAINYARD_LAUNCHER", environ)
    settings = settings.model_copy(update=changes | {"identity": settings.identity or launcher_id(home)})
    return Launcher(
        home=home,
        celery=celery,
        endpoint=endpoint,
        token=token,
        tokens=tokens,
        backend=backend or _backend(home, endpoint, settings, registry),
        settings=settings,
        registry=registry,
        registered=registered,
    )


def _backend(home: Path, endpoint: str, settings: Settings, registry: CollectorRegistry | None) -> Backend:
    if settings.backend == "kubernetes":
        from trainyard_launcher.backends.kubernetes import KubernetesBackend

        return KubernetesBackend(endpoint, settings, registry)
    from trainyard_launcher.backends.process import ProcessBackend

    return ProcessBackend(home, settings)
