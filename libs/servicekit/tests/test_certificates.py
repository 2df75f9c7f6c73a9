"""A renewed certificate is shown to whoever connects next."""

from __future__ import annotations

import asyncio
import datetime
import socket
import ssl
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from prometheus_client import CollectorRegistry
from servicekit.auth import AttemptTokens
from servicekit.certificates import Tls
from servicekit.host import Host


def write_certificate(folder: Path, name: str, days: int = 1) -> Tls:
    """Puts a certificate of that name in place, as a volume of a cluster would: by renaming."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
    certificate = (
        builder.not_valid_before(now).not_valid_after(now + datetime.timedelta(days)).sign(key, hashes.SHA256())
    )
    tls = Tls(folder / "tls.crt", folder / "tls.key")
    _replace(tls.certificate, certificate.public_bytes(serialization.Encoding.PEM))
    private = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    _replace(tls.key, key.private_bytes(*private))
    return tls


def _replace(path: Path, content: bytes) -> None:
    draft = path.with_suffix(".new")
    draft.write_bytes(content)
    draft.replace(path)


def name_shown(port: int) -> str:
    """The name in the certificate that a server shows to a new connection."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2", "http/1.1"])
    with socket.create_connection(("127.0.0.1", port)) as plain, context.wrap_socket(plain) as encrypted:
        shown = x509.load_der_x509_certificate(encrypted.getpeercert(binary_form=True) or b"")
    return str(shown.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)


@pytest.fixture
async def host(tmp_path: Path):
    host = Host(["metrics"], tmp_path, "t" * 20, AttemptTokens.load_or_create(tmp_path))
    yield host
    await host.stop()


async def _shown(port: int) -> str:
    return await asyncio.to_thread(name_shown, port)


async def test_on_the_grpc_port(host: Host, tmp_path: Path) -> None:
    port = host.listen("127.0.0.1", 0, write_certificate(tmp_path, "first"))
    await host.server.start()
    assert await _shown(port) == "first"
    write_certificate(tmp_path, "second")
    assert await _shown(port) == "second"


async def test_on_the_http_port(host: Host, tmp_path: Path) -> None:
    url = await host.expose("127.0.0.1", 0, write_certificate(tmp_path, "first"))
    port = int(url.rpartition(":")[2].partition("/")[0])
    assert await _shown(port) == "first"
    write_certificate(tmp_path, "second")
    assert await _shown(port) == "second"


async def test_files_that_are_gone_leave_the_last_certificate(host: Host, tmp_path: Path) -> None:
    tls = write_certificate(tmp_path, "first")
    port = host.listen("127.0.0.1", 0, tls)
    await host.server.start()
    tls.certificate.unlink()
    assert await _shown(port) == "first"


async def test_its_end_is_shown_as_a_metric(host: Host, tmp_path: Path) -> None:
    host.listen("127.0.0.1", 0, write_certificate(tmp_path, "first", days=1))
    first = _expiry(host.registry)
    write_certificate(tmp_path, "second", days=9)
    assert _expiry(host.registry) > first


def _expiry(registry: CollectorRegistry) -> float:
    found = registry.get_sample_value("trainyard_certificate_expiry_seconds", {"listener": "grpc"})
    assert found is not None
    return found
