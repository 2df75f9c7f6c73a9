"""The disk and the certificate of a process, as Prometheus sees them."""

import datetime
import shutil

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from prometheus_client import CollectorRegistry
from servicekit.auth import AttemptTokens
from servicekit.host import Host
from servicekit.server import Tls
from servicekit.vitals import CertificateGauge, watch_disk

NEVER = datetime.datetime(2040, 1, 1, tzinfo=datetime.UTC)
SOON = datetime.datetime(2030, 6, 1, tzinfo=datetime.UTC)


def certificate(end):
    """Certificate and key, PEM, valid until then."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC))
        .not_valid_after(end)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return made.public_bytes(serialization.Encoding.PEM), private


def expiry(registry, listener):
    return registry.get_sample_value("trainyard_certificate_expiry_seconds", {"listener": listener})


def test_the_disk_of_a_folder_is_shown(tmp_path):
    registry = CollectorRegistry()
    watch_disk(registry, tmp_path)
    assert registry.get_sample_value("trainyard_disk_size_bytes") == shutil.disk_usage(tmp_path).total
    assert 0 < registry.get_sample_value("trainyard_disk_free_bytes") < shutil.disk_usage(tmp_path).total


def test_of_a_chain_the_certificate_that_ends_first_counts(tmp_path):
    registry = CollectorRegistry()
    (tmp_path / "chain.pem").write_bytes(certificate(NEVER)[0] + certificate(SOON)[0])
    CertificateGauge(registry).show("grpc", tmp_path / "chain.pem")
    assert expiry(registry, "grpc") == SOON.timestamp()


async def test_a_process_with_tls_shows_the_end_of_the_certificate_of_both_of_its_ports(tmp_path):
    pem, key = certificate(NEVER)
    tls = Tls(tmp_path / "cert.pem", tmp_path / "key.pem")
    tls.certificate.write_bytes(pem)
    tls.key.write_bytes(key)
    host = Host(["metrics"], tmp_path, "a-token-of-some-length", AttemptTokens.load_or_create(tmp_path))
    host.listen("127.0.0.1", 0, tls)
    assert (expiry(host.registry, "grpc"), expiry(host.registry, "http")) == (NEVER.timestamp(), None)
    assert (await host.expose("127.0.0.1", 0, tls)).startswith("https://")
    assert expiry(host.registry, "http") == NEVER.timestamp()
    await host.stop()


async def test_without_tls_no_end_is_shown(tmp_path):
    host = Host(["metrics"], tmp_path, "a-token-of-some-length", AttemptTokens.load_or_create(tmp_path))
    host.listen("127.0.0.1", 0)
    assert expiry(host.registry, "grpc") is None
    await host.stop()


def test_a_file_without_a_certificate_is_refused(tmp_path):
    (tmp_path / "cert.pem").write_text("no certificate")
    with pytest.raises(ValueError):
        CertificateGauge(CollectorRegistry()).show("grpc", tmp_path / "cert.pem")
