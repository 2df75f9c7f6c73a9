"""Safe by default: who may talk to a yard, over what, and how much."""

import datetime
import ipaddress
import json
import stat
from pathlib import Path

import grpc
import pytest
from trainyard import errors
from trainyard.client import Client
from trainyard.home import read_endpoint
from trainyard_protos.v1 import scheduler_pb2, scheduler_pb2_grpc

from tests.jobs import WAIT_S, document, output, running


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_folder_and_its_keys_are_their_owners_alone(shared_yard):
    assert mode(shared_yard.folder) == 0o700
    assert [mode(shared_yard.folder / name) for name in ("token", "attempt.key")] == [0o600, 0o600]


@pytest.mark.parametrize("metadata", [[], [("authorization", "Bearer wrong")], [("authorization", "Basic x")]])
def test_a_caller_without_the_token_is_refused_on_loopback_too(shared_yard, metadata):
    with grpc.insecure_channel(read_endpoint(shared_yard.folder).endpoint) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            stub.ListJobs(scheduler_pb2.ListJobsRequest(), metadata=metadata, timeout=WAIT_S)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_foreign_token_is_refused_with_what_to_do(shared_yard):
    foreign = Client(read_endpoint(shared_yard.folder).endpoint, token="foreign")
    with foreign as client, pytest.raises(errors.Refused) as refused:
        list(client.list())
    assert "token" in (refused.value.message + refused.value.hint).lower()


def test_a_listener_beyond_loopback_needs_tls(home):
    result = home.run("up", "--host", "0.0.0.0")
    assert result.returncode == 2, result.stderr
    assert "TLS" in result.stderr and "--tls-cert" in result.stderr
    home.assert_nothing_left()


@pytest.fixture
def certificate(tmp_path):
    """A self-made certificate for 127.0.0.1 and its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "yard of a test")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    (tmp_path / "cert.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    (tmp_path / "key.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return tmp_path / "cert.pem", tmp_path / "key.pem"


def test_a_yard_with_tls_is_used_by_clients_that_know_its_root_alone(make_home, certificate):
    cert, key = certificate
    home = make_home(TRAINYARD_CA_FILE=str(cert))
    up = home.run("up", "--host", "0.0.0.0", "--tls-cert", cert, "--tls-key", key)
    assert up.returncode == 0, up.stderr + home.log()
    endpoint, token = read_endpoint(home.folder).endpoint, (home.folder / "token").read_text().strip()
    with Client(endpoint, token=token, ca_file=cert) as client:
        job = client.submit(document(["echo", "over TLS"]))
        job.wait(WAIT_S)
        assert output(job) == ["over TLS"]
    assert home.run("jobs").returncode == 0
    with Client(endpoint, token=token) as client, pytest.raises(errors.NotRunning):
        list(client.list())
    # It ends by its own root and token, also where the environment names those of another yard.
    home.environ |= {"TRAINYARD_CA_FILE": str(key), "TRAINYARD_TOKEN": "of another"}
    home.down()
    home.assert_nothing_left()


def test_a_document_that_is_too_large_is_refused_with_the_limit(client, tmp_path):
    (tmp_path / "job.yaml").write_text("x" * (1024 * 1024 + 1))
    with pytest.raises(errors.InvalidArgument, match="1 MiB"):
        client.submit(tmp_path / "job.yaml")
    with pytest.raises(errors.YardError) as refused:
        client.submit(document(["true"], env={"BLOB": "x" * (1024 * 1024 + 1)}))
    assert refused.value.exit_code == 2
    assert "MiB" in str(refused.value) or "bytes" in str(refused.value)


def test_a_message_that_is_too_large_is_refused_with_what_to_do(client):
    with pytest.raises(errors.YardError) as refused:
        client.submit(document(["true"], env={"BLOB": "x" * (17 * 1024 * 1024)}))
    assert refused.value.exit_code in (2, 6)
    assert refused.value.exit_code != errors.Defect.exit_code


def test_the_token_of_an_attempt_may_not_act_as_its_user(shared_yard, client):
    job = client.submit(document(["sleep", "600"], gracePeriod="1s"))
    running(job)
    plan = shared_yard.folder / "attempts" / job.status().attempt_id / "node-0" / "plan.json"
    assert mode(plan) == 0o600
    with Client(read_endpoint(shared_yard.folder).endpoint, token=json.loads(plan.read_text())["token"]) as worker:
        for forbidden in (lambda: worker.submit(document(["true"])), lambda: worker.job(job.id).cancel()):
            with pytest.raises(errors.Refused):
                forbidden()
    job.cancel()
    assert job.wait(WAIT_S, check=False).reason == "Cancelled"
