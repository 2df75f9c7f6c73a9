"""Before an installation or an upgrade: what is missing is made, what is there stays as it is.

The exception is the services' certificate, which is renewed near its end or when it lacks a name; the authority that
signed it stays, so clients need not be told.
"""

from __future__ import annotations

import datetime
import logging
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

import yaml

from trainyard_setup import certificates, secrets
from trainyard_setup.cluster import Cluster
from trainyard_setup.secrets import AUTHORITY, CERTIFICATE, KEY, Data
from trainyard_setup.settings import Settings

logger = logging.getLogger(__name__)
_LOOK_S = 1.0


class Incomplete(Exception):
    """A secret that is there lacks what the services need; the message says which and what to do."""


class Keeper(Protocol):
    """Where secrets are kept."""

    def secret(self, namespace: str, name: str) -> Data | None: ...

    def create_secret(self, namespace: str, name: str, data: Data) -> Data: ...

    def replace_secret(self, namespace: str, name: str, data: Data) -> None: ...


def install(settings: Settings, cluster: Cluster, now: datetime.datetime) -> None:
    """Makes everything that is missing.

    Raises:
        Incomplete: a secret that is there lacks a key, or one that was promised does not come; or jobs run where they
            would not be found any more; or the chart is not of this version.
    """
    require_version(settings.chart_version, version("trainyard-setup"))
    require_moved(settings, cluster)
    make_secrets(settings, cluster, now)
    root = _root(settings, cluster, now)
    if root and settings.authority_config_map:
        for namespace in {settings.namespace, settings.jobs_namespace}:
            cluster.write_config_map(namespace, settings.authority_config_map, {AUTHORITY: root.decode()})
    for path in sorted(Path(settings.definitions).glob("*.yaml")) if settings.definitions else ():
        definition = yaml.safe_load(path.read_text())
        if cluster.update_definition(definition):
            logger.info("definition is up to date", extra={"definition": definition["metadata"]["name"]})


def require_version(chart: str, image: str) -> None:
    """A chart tells services what only those of its own version understand.

    Raises:
        Incomplete: the image is of another.
    """
    if chart and chart != image:
        raise Incomplete(
            f"the chart is of version {chart}, and the image of {image}: install the chart of {image}, or leave "
            f"image.tag and agentImage.tag empty, or set them to images of {chart}"
        )


def require_moved(settings: Settings, cluster: Cluster) -> None:
    """Jobs of a version that ran them beside the yard keep the installation where it is.

    Raises:
        Incomplete: some still run there, and the launcher is to look elsewhere.
    """
    if settings.jobs_namespace == settings.namespace:
        return
    names = cluster.jobs(settings.namespace, settings.pool, settings.launcher, settings.endpoint, unfinished=True)
    if names:
        raise Incomplete(
            f"{len(names)} jobs run in namespace '{settings.namespace}', for instance {names[0]}, and the launcher is "
            f"to look in '{settings.jobs_namespace}' from now on: upgrade with jobs.namespace={settings.namespace} "
            "until they are over, or end them with: yard cancel"
        )


def make_secrets(settings: Settings, keeper: Keeper, now: datetime.datetime) -> None:
    """The secrets beside the certificate's."""
    wanted: list[tuple[str, Sequence[str], Callable[[], Data]]] = [
        (settings.token_secret, ["token"], secrets.token),
        (settings.scrape_token_secret, ["token"], secrets.scrape_token),
        (settings.operator_token_secret, ["token"], secrets.operator_token),
        (settings.attempt_key_secret, ["attempt.key", "attempt.pub"], secrets.attempt_key),
        (settings.redis_secret, ["password", "url"], lambda: secrets.redis(settings.redis_host)),
    ]
    for name, keys, make in wanted:
        if name:
            ensure(keeper, settings.namespace, name, keys, make)


def ensure(keeper: Keeper, namespace: str, name: str, keys: Sequence[str], make: Callable[[], Data]) -> Data:
    """The content of a secret, made when it is missing.

    Raises:
        Incomplete: it is there and lacks a key.
    """
    found = keeper.secret(namespace, name)
    if found is None:
        logger.info("secret is made", extra={"secret": name})
        found = keeper.create_secret(namespace, name, make())
    missing = [key for key in keys if not found.get(key)]
    if missing:
        raise Incomplete(
            f"secret '{name}' in namespace '{namespace}' has no {' and no '.join(missing)}: add it, or delete the "
            "secret to have a new one made"
        )
    return found


def certify(settings: Settings, keeper: Keeper, now: datetime.datetime) -> bytes:
    """Makes or renews the services' certificate; returns the root that signed it."""
    namespace, name, hosts = settings.namespace, settings.certificate_secret, settings.names()
    root = ensure(
        keeper,
        namespace,
        settings.authority_secret,
        [CERTIFICATE, KEY],
        lambda: secrets.authority(settings.release, now),
    )

    def make() -> Data:
        return secrets.certificate(root, settings.release, hosts, now, settings.certificate_days)

    found = ensure(keeper, namespace, name, [CERTIFICATE, KEY, AUTHORITY], make)
    why = certificates.why_renew(found[CERTIFICATE], root[CERTIFICATE], hosts, now)
    if why:
        logger.info("certificate is renewed", extra={"secret": name, "why": why})
        keeper.replace_secret(namespace, name, make())
    return root[CERTIFICATE]


def _root(settings: Settings, cluster: Cluster, now: datetime.datetime) -> bytes:
    if settings.certificate_secret:
        return certify(settings, cluster, now)
    if settings.given_certificate_secret:
        return _given(settings, cluster)
    return b""


def _given(settings: Settings, cluster: Cluster) -> bytes:
    """The root of a certificate that somebody else makes, for instance cert-manager."""
    deadline = time.monotonic() + settings.given_certificate_wait_s
    name, namespace = settings.given_certificate_secret, settings.namespace
    while (found := cluster.secret(namespace, name)) is None or not found.get(CERTIFICATE):
        if time.monotonic() > deadline:
            raise Incomplete(
                f"secret '{name}' is not in namespace '{namespace}': make it with tls.crt, tls.key and ca.crt, or "
                "leave tls.existingSecret empty to have a certificate made"
            )
        time.sleep(_LOOK_S)
    missing = [key for key in (CERTIFICATE, KEY, AUTHORITY) if not found.get(key)]
    if missing:
        raise Incomplete(
            f"secret '{name}' in namespace '{namespace}' has no {' and no '.join(missing)}; clients check the "
            "services' certificate against ca.crt"
        )
    return found[AUTHORITY]
