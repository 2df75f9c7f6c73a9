"""What is made for an installation, and what never changes again."""

from __future__ import annotations

import datetime
import ssl
from pathlib import Path

import pytest
from cryptography import x509
from servicekit.auth import AttemptTokens, AttemptVerifier
from trainyard_setup import certificates
from trainyard_setup.install import Incomplete, certify, make_secrets
from trainyard_setup.secrets import Data
from trainyard_setup.settings import Settings

NOW = datetime.datetime(2030, 1, 1, tzinfo=datetime.UTC)
HOSTS = "yard-gateway.platform.svc,*.yard-metrics.platform.svc,10.0.0.7"
DAYS = 90


class Shelf:
    """Keeps secrets in memory."""

    def __init__(self) -> None:
        self.kept: dict[str, Data] = {}

    def secret(self, namespace: str, name: str) -> Data | None:
        return self.kept.get(name)

    def create_secret(self, namespace: str, name: str, data: Data) -> Data:
        return self.kept.setdefault(name, data)

    def replace_secret(self, namespace: str, name: str, data: Data) -> None:
        self.kept[name] = data


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


def settings(**changes: object) -> Settings:
    values: dict[str, object] = {
        "release": "yard",
        "namespace": "platform",
        "jobs_namespace": "jobs",
        "token_secret": "yard-token",
        "scrape_token_secret": "yard-scrape-token",
        "operator_token_secret": "yard-operator-token",
        "attempt_key_secret": "yard-attempt-key",
        "redis_secret": "yard-redis",
        "redis_host": "yard-redis.platform.svc",
        "certificate_secret": "yard-tls",
        "authority_secret": "yard-authority",
        "hosts": HOSTS,
        "certificate_days": DAYS,
    }
    return Settings.model_validate(values | changes)


def days(number: float) -> datetime.timedelta:
    return datetime.timedelta(days=number)


def test_a_first_run_makes_every_secret(shelf: Shelf) -> None:
    make_secrets(settings(), shelf, NOW)
    certify(settings(), shelf, NOW)
    names = ["attempt-key", "authority", "operator-token", "redis", "scrape-token", "tls", "token"]
    assert sorted(shelf.kept) == [f"yard-{name}" for name in names]
    tokens = [shelf.kept[f"yard-{name}"]["token"] for name in ("token", "scrape-token", "operator-token")]
    assert len(set(tokens)) == len(tokens)


def test_a_second_run_changes_nothing(shelf: Shelf) -> None:
    make_secrets(settings(), shelf, NOW)
    certify(settings(), shelf, NOW)
    before = dict(shelf.kept)
    make_secrets(settings(), shelf, NOW + days(1))
    certify(settings(), shelf, NOW + days(1))
    assert shelf.kept == before


def test_secrets_of_others_are_not_made(shelf: Shelf) -> None:
    make_secrets(
        settings(token_secret="", scrape_token_secret="", operator_token_secret="", redis_secret=""), shelf, NOW
    )
    assert sorted(shelf.kept) == ["yard-attempt-key"]


def test_a_secret_without_its_key_is_named(shelf: Shelf) -> None:
    shelf.kept["yard-token"] = {"tokens": b"x"}
    with pytest.raises(Incomplete, match="secret 'yard-token' in namespace 'platform' has no token"):
        make_secrets(settings(), shelf, NOW)


def test_attempts_tokens_of_the_key_are_verified_by_its_public_half(shelf: Shelf, tmp_path: Path) -> None:
    make_secrets(settings(), shelf, NOW)
    for name, content in shelf.kept["yard-attempt-key"].items():
        (tmp_path / name).write_bytes(content)
    token, _ = AttemptTokens.load_private(tmp_path / "attempt.key").mint(
        workspace="default", job_id="j", attempt_id="a", fence=3, ttl_s=60
    )
    assert AttemptVerifier.load(tmp_path / "attempt.pub").verify(token).fence == 3


def test_clients_that_trust_the_authority_accept_the_certificate(shelf: Shelf, tmp_path: Path) -> None:
    now = datetime.datetime.now(datetime.UTC)
    root = certify(settings(hosts="localhost,127.0.0.1"), shelf, now)
    made = shelf.kept["yard-tls"]
    (tmp_path / "chain").write_bytes(made["tls.crt"] + made["tls.key"])
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_side.load_cert_chain(tmp_path / "chain")
    client = ssl.create_default_context(cadata=root.decode())
    assert _shake_hands(client, server_side, "localhost")
    with pytest.raises(ssl.SSLCertVerificationError):
        _shake_hands(client, server_side, "elsewhere")


def _shake_hands(client_side: ssl.SSLContext, server_side: ssl.SSLContext, name: str) -> bool:
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_side.wrap_bio(to_client, to_server, server_hostname=name)
    server = server_side.wrap_bio(to_server, to_client, server_side=True)
    waiting = [client, server]
    for _ in range(10):
        for side in list(waiting):
            try:
                side.do_handshake()
                waiting.remove(side)
            except ssl.SSLWantReadError:
                pass
    return not waiting


def test_a_certificate_is_renewed_when_a_third_of_its_time_is_left(shelf: Shelf) -> None:
    certify(settings(), shelf, NOW)
    first = shelf.kept["yard-tls"]
    certify(settings(), shelf, NOW + days(DAYS * 0.6))
    assert shelf.kept["yard-tls"] == first
    certify(settings(), shelf, NOW + days(DAYS * 0.7))
    renewed = shelf.kept["yard-tls"]
    assert certificates.ends(renewed["tls.crt"]) > certificates.ends(first["tls.crt"])
    assert renewed["ca.crt"] == first["ca.crt"]


def test_a_certificate_that_lacks_a_name_is_renewed(shelf: Shelf) -> None:
    certify(settings(), shelf, NOW)
    certify(settings(hosts=f"{HOSTS},yard.example.org"), shelf, NOW + days(1))
    found = x509.load_pem_x509_certificate(shelf.kept["yard-tls"]["tls.crt"])
    held = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "yard.example.org" in held.get_values_for_type(x509.DNSName)


def test_a_certificate_of_another_authority_is_renewed(shelf: Shelf) -> None:
    certify(settings(), shelf, NOW)
    shelf.kept.pop("yard-authority")
    root = certify(settings(), shelf, NOW)
    assert certificates.why_renew(shelf.kept["yard-tls"]["tls.crt"], root, settings().names(), NOW) == ""


def test_no_certificate_outlives_its_authority(shelf: Shelf) -> None:
    root = certify(settings(certificate_days=certificates.AUTHORITY_DAYS * 2), shelf, NOW)
    assert certificates.ends(shelf.kept["yard-tls"]["tls.crt"]) <= certificates.ends(root)
