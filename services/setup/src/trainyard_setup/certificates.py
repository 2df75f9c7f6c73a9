"""An authority of the installation's own, and the certificate it signs for the services.

Clients trust the authority, which outlives every certificate; renewing one needs no word to anybody.
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY_DAYS = 3650
_BACKDATED = datetime.timedelta(hours=1)  # clocks of nodes differ
_RENEW_WHEN_LEFT = 1 / 3


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its private key, both PEM."""

    certificate: bytes
    key: bytes


def make_authority(name: str, now: datetime.datetime) -> Pair:
    """A new authority, which signs its own certificate."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _name(f"{name} authority")
    usage = x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=True,
        crl_sign=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    builder = (
        _builder(subject, subject, key, now, AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    return _pair(builder.sign(key, hashes.SHA256()), key)


def issue(authority: Pair, name: str, hosts: Sequence[str], now: datetime.datetime, days: int) -> Pair:
    """A new certificate for servers under the given names and addresses.

    Args:
        hosts: DNS names, also with a wildcard, and IP addresses.
        days: how long it is valid, at most as long as the authority.
    """
    issuer, signer = _load(authority)
    key = ec.generate_private_key(ec.SECP256R1())
    left = (issuer.not_valid_after_utc - now).days
    builder = (
        _builder(_name(name), issuer.subject, key, now, min(days, left))
        .add_extension(x509.SubjectAlternativeName([_alternative(host) for host in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    return _pair(builder.sign(signer, hashes.SHA256()), key)


def why_renew(certificate: bytes, authority: bytes, hosts: Sequence[str], now: datetime.datetime) -> str:
    """What is wrong with a certificate, or "" when it is good for long enough.

    Args:
        certificate: PEM.
        authority: PEM of the authority that has to have signed it.
        hosts: names and addresses that it has to hold.
    """
    found, issuer = x509.load_pem_x509_certificate(certificate), x509.load_pem_x509_certificate(authority)
    try:
        found.verify_directly_issued_by(issuer)
    except Exception:  # several kinds, all of them mean no
        return "another authority signed it"
    whole = found.not_valid_after_utc - found.not_valid_before_utc
    if found.not_valid_after_utc - now < whole * _RENEW_WHEN_LEFT:
        return f"it ends at {found.not_valid_after_utc:%Y-%m-%d}"
    held = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    missing = [host for host in hosts if _alternative(host) not in held]
    return f"it does not hold {', '.join(missing)}" if missing else ""


def ends(certificate: bytes) -> datetime.datetime:
    """When a PEM certificate ends."""
    return x509.load_pem_x509_certificate(certificate).not_valid_after_utc


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime.datetime, days: int
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common[:64])])


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _load(pair: Pair) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    key = serialization.load_pem_private_key(pair.key, password=None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return x509.load_pem_x509_certificate(pair.certificate), key


def _pair(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Pair:
    return Pair(
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )
