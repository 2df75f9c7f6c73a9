"""The certificate that a server shows. When its files change, whoever connects next sees the new one: a renewal ends no
stream and needs no restart.
"""

from __future__ import annotations

import logging
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

logger = logging.getLogger(__name__)
_Version = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tls:
    """Certificate chain and private key of the server, PEM files."""

    certificate: Path
    key: Path

    def version(self) -> _Version:
        """Differs when the files do."""
        found = [path.stat() for path in (self.certificate, self.key)]
        return tuple(part for each in found for part in (each.st_ino, each.st_mtime_ns, each.st_size))


def grpc_credentials(tls: Tls) -> grpc.ServerCredentials:
    """What a gRPC server listens with.

    Raises:
        OSError: a file cannot be read.
    """
    shown = tls.version()

    def renewed() -> Any:
        nonlocal shown
        found = _version(tls)
        if found is None or found == shown:
            return None  # as before
        shown = found
        return _configuration(tls)

    return grpc.dynamic_ssl_server_credentials(_configuration(tls), renewed)


def http_context(tls: Tls) -> ssl.SSLContext:
    """What an HTTP server listens with.

    Raises:
        OSError: a file cannot be read, or is none.
    """
    first = newest = _context(tls)
    shown = tls.version()

    def renewed(connection: ssl.SSLObject, name: str | None, original: ssl.SSLContext) -> None:
        nonlocal shown, newest
        found = _version(tls)
        if found is not None and found != shown:
            newest, shown = _context(tls), found
        connection.context = newest

    first.sni_callback = renewed
    return first


def _context(tls: Tls) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tls.certificate, tls.key)
    return context


def _version(tls: Tls) -> _Version | None:
    try:
        return tls.version()
    except OSError as error:
        logger.warning("the certificate cannot be read, the last one is shown", extra={"why": str(error)})
        return None


def _configuration(tls: Tls) -> Any:
    return grpc.ssl_server_certificate_configuration([(tls.key.read_bytes(), tls.certificate.read_bytes())])
