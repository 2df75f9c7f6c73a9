"""What every process shows of the ground it stands on: room on its disk, and until when its certificate is valid."""

from __future__ import annotations

import shutil
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge


def watch_disk(registry: CollectorRegistry, folder: Path) -> None:
    """Shows how much room there is, and is left, where a service keeps its files."""
    size = Gauge("trainyard_disk_size_bytes", "Size of the disk that holds this service's files", registry=registry)
    free = Gauge("trainyard_disk_free_bytes", "What is free of it", registry=registry)
    size.set_function(lambda: shutil.disk_usage(folder).total)
    free.set_function(lambda: shutil.disk_usage(folder).free)


class CertificateGauge:
    """When the certificates end that this process serves with.

    Read from its file whenever it is asked for, as whoever connects is shown the newest one.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._gauge = Gauge(
            "trainyard_certificate_expiry_seconds",
            "End of the served certificate, Unix time",
            ["listener"],
            registry=registry,
        )

    def show(self, listener: str, certificate: Path) -> None:
        """From now on a listener serves with this chain; the first of its certificates to end counts.

        Raises:
            ValueError: the file holds no certificate.
            OSError: it cannot be read.
        """
        _first_end(certificate)
        self._gauge.labels(listener).set_function(lambda: _first_end(certificate))


def _first_end(certificate: Path) -> float:
    from cryptography.x509 import load_pem_x509_certificates  # no matter of a yard on loopback

    chain = load_pem_x509_certificates(certificate.read_bytes())
    return min(each.not_valid_after_utc for each in chain).timestamp()
