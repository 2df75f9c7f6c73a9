import datetime
import ipaddress
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from trainyard import channel, errors
from trainyard.client import AsyncClient
from trainyard_protos.v1 import yard_pb2, yard_pb2_grpc


@pytest.mark.parametrize("endpoint", ["127.0.0.1:1", "127.8.9.1:1", "localhost:1", "[::1]:1"])
def test_this_machine_is_loopback(endpoint: str) -> None:
    assert channel.is_loopback(endpoint)


@pytest.mark.parametrize("endpoint", ["10.0.0.1:1", "example.com:1", "0.0.0.0:1", "127.0.0.1.example.com:1", "[::]:1"])
async def test_a_token_never_leaves_this_machine_in_plaintext(endpoint: str) -> None:
    assert not channel.is_loopback(endpoint)
    with pytest.raises(ValueError, match="beyond this machine"):
        channel.connect(endpoint, "a-token")
    with pytest.raises(errors.InvalidArgument) as caught:
        AsyncClient(endpoint, token="a-token")
    assert "TRAINYARD_CA_FILE" in caught.value.hint


async def test_tls_reaches_a_yard_and_carries_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, certificate = self_signed()
    (tmp_path / "ca.pem").write_bytes(certificate)
    server = grpc.aio.server()
    servicer = _Yard()
    yard_pb2_grpc.add_YardServiceServicer_to_server(servicer, server)
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, certificate)]))
    await server.start()
    monkeypatch.setenv("TRAINYARD_ENDPOINT", f"127.0.0.1:{port}")
    monkeypatch.setenv("TRAINYARD_TOKEN", "a-token")
    monkeypatch.setenv("TRAINYARD_CA_FILE", str(tmp_path / "ca.pem"))
    async with AsyncClient() as client:
        assert (await client.info()).version == "9"
    assert servicer.seen == "Bearer a-token"
    await server.stop(None)


async def test_a_missing_root_certificate_is_named(tmp_path: Path) -> None:
    with pytest.raises(errors.InvalidArgument, match=r"nowhere\.pem"):
        AsyncClient("example.com:1", token="a-token", ca_file=tmp_path / "nowhere.pem")


class _Yard(yard_pb2_grpc.YardServiceServicer):
    seen: object = None

    async def Info(self, request: object, context: grpc.aio.ServicerContext) -> yard_pb2.InfoResponse:  # type: ignore[override, type-arg]
        self.seen = dict(context.invocation_metadata() or ())["authorization"]
        return yard_pb2.InfoResponse(version="9")


def self_signed() -> tuple[bytes, bytes]:
    """A key and a certificate for 127.0.0.1, PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "yard")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return private, certificate.public_bytes(pem)
