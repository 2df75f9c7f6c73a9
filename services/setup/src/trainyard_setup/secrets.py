"""What each secret of an installation holds. Everything here is made once; only a certificate is ever made anew."""

from __future__ import annotations

import datetime
import secrets
from collections.abc import Mapping, Sequence
from urllib.parse import quote

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from trainyard_setup import certificates
from trainyard_setup.certificates import Pair

CERTIFICATE, KEY, AUTHORITY = "tls.crt", "tls.key", "ca.crt"
"""Keys of a secret with a certificate, as cert-manager names them."""
AUTHORITY_FILE = "/etc/trainyard/tls/ca.crt"
"""Where the chart mounts the root certificate."""
REDIS_PORT = 6379

Data = dict[str, bytes]


def token() -> Data:
    """The users' token."""
    return {"token": secrets.token_urlsafe(32).encode()}


def scrape_token() -> Data:
    """The token that opens `/metrics` and nothing else."""
    return token()


def operator_token() -> Data:
    """The operator's token: with it a job counts as one that the cluster checked."""
    return token()


def attempt_key() -> Data:
    """The key pair of attempts' tokens: the launcher is shown the private half, everybody the public one."""
    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return {"attempt.key": private, "attempt.pub": public}


def redis(host: str) -> Data:
    """Password and address of the installation's own Redis."""
    password = secrets.token_urlsafe(32)
    checks = f"ssl_cert_reqs=required&ssl_ca_certs={quote(AUTHORITY_FILE, safe='')}"
    url = f"rediss://:{password}@{host}:{REDIS_PORT}/0?{checks}"
    return {"password": password.encode(), "url": url.encode()}


def authority(release: str, now: datetime.datetime) -> Data:
    """The authority that signs the services' certificates."""
    pair = certificates.make_authority(release, now)
    return {CERTIFICATE: pair.certificate, KEY: pair.key}


def certificate(
    authority: Mapping[str, bytes], name: str, hosts: Sequence[str], now: datetime.datetime, days: int
) -> Data:
    """The services' certificate, signed by the authority of the given secret."""
    root = Pair(authority[CERTIFICATE], authority[KEY])
    pair = certificates.issue(root, name, hosts, now, days)
    return {CERTIFICATE: pair.certificate, KEY: pair.key, AUTHORITY: root.certificate}
