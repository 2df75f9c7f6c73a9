"""The certificates of a cluster: an authority of its own, what it signs, and the kubeconfigs made with them."""

from __future__ import annotations

import base64
import datetime
import ipaddress
import json
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from scripts.testbed.cluster.layout import CONTROL, NODES, Layout

ADMIN = "admin"
_VALID = datetime.timedelta(days=365)
_CLOCKS = datetime.timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its key, in files."""

    certificate: Path
    key: Path


def pair(layout: Layout, name: str) -> Pair:
    """Where the certificate of that name is."""
    folder = layout.folder / "certificates"
    return Pair(folder / f"{name}.crt", folder / f"{name}.key")


def kubeconfig(layout: Layout, user: str) -> Path:
    """Where the kubeconfig of that user is."""
    return layout.kubeconfig if user == ADMIN else layout.folder / "certificates" / f"{user}.kubeconfig"


def make(layout: Layout) -> None:
    """Makes all of them, when they are not there: the administrator's kubeconfig comes last, and as a whole."""
    authority = pair(layout, "ca")
    if layout.kubeconfig.exists():
        return
    authority.key.parent.mkdir(parents=True, exist_ok=True)
    issuer = _Issuer(authority)
    addresses = [layout.api_service, layout.address(CONTROL), "127.0.0.1"]
    names = ["kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local"]
    issuer.issue(pair(layout, "apiserver"), "kube-apiserver", alternatives=[*names, *addresses])
    issuer.issue(pair(layout, "apiserver-kubelet"), "kube-apiserver-kubelet-client", "system:masters")
    issuer.issue(pair(layout, "service-accounts"), "service-accounts")
    for node in NODES:
        subject = f"system:node:{node}"
        issuer.issue(pair(layout, node), subject, "system:nodes", alternatives=[node, layout.address(node)])
        _write_kubeconfig(layout, node)
    for user in ("kube-controller-manager", "kube-scheduler", "kube-proxy"):
        issuer.issue(pair(layout, user), f"system:{user}")
        _write_kubeconfig(layout, user)
    issuer.issue(pair(layout, ADMIN), ADMIN, "system:masters")
    _write_kubeconfig(layout, ADMIN)


class _Issuer:
    """Signs certificates; made with a certificate of its own."""

    def __init__(self, files: Pair) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "testbed")])
        usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
        builder = self._builder(self._name, self._key).add_extension(x509.BasicConstraints(True, None), critical=True)
        _write(files, builder.add_extension(usage, critical=True).sign(self._key, hashes.SHA256()), self._key)

    def issue(self, files: Pair, name: str, group: str = "", alternatives: list[str] | None = None) -> None:
        """Makes a certificate for a client and a server.

        Args:
            files: to write.
            name: of the user.
            group: the user's; empty for none.
            alternatives: the DNS names and addresses of the server.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        attributes = [x509.NameAttribute(NameOID.COMMON_NAME, name)]
        if group:
            attributes.append(x509.NameAttribute(NameOID.ORGANIZATION_NAME, group))
        usages = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH])
        builder = self._builder(x509.Name(attributes), key).add_extension(usages, critical=False)
        if alternatives:
            known_as = x509.SubjectAlternativeName([_alternative(item) for item in alternatives])
            builder = builder.add_extension(known_as, critical=False)
        _write(files, builder.sign(self._key, hashes.SHA256()), key)

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(self._name).public_key(key.public_key())
        builder = builder.serial_number(x509.random_serial_number())
        return builder.not_valid_before(now - _CLOCKS).not_valid_after(now + _VALID)


def _alternative(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _write(files: Pair, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
    files.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    files.key.touch(mode=0o600)
    files.key.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )


def _write_kubeconfig(layout: Layout, user: str) -> None:
    files = pair(layout, user)
    cluster = {"server": layout.api, "certificate-authority-data": _encoded(pair(layout, "ca").certificate)}
    secrets = {"client-certificate-data": _encoded(files.certificate), "client-key-data": _encoded(files.key)}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": layout.name, "cluster": cluster}],
        "users": [{"name": user, "user": secrets}],
        "contexts": [{"name": layout.name, "context": {"cluster": layout.name, "user": user}}],
        "current-context": layout.name,
    }
    path = kubeconfig(layout, user)
    draft = path.with_name(f"{path.name}.draft")
    draft.touch(mode=0o600)
    draft.write_text(json.dumps(config, indent=1))
    draft.rename(path)


def _encoded(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()
