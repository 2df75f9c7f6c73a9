"""The large installation: PostgreSQL, Redis and S3 by their addresses under TLS, secrets of others, two schedulers."""

from __future__ import annotations

import base64
import datetime
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from trainyard.client import Client
from trainyard.errors import YardError
from trainyard_setup import certificates
from trainyard_setup.certificates import Pair

from scripts.testbed.cluster.cluster import Cluster
from scripts.testbed.patience import PATIENCE_S
from scripts.testbed.yard import Stores
from tests.cluster.release import Release, small_job
from tests.cluster.tls_front import tls_front
from tests.conftest import wait_until

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.timeout(8 * PATIENCE_S)]


@pytest.fixture
def release(cluster: Cluster, cluster_namespace: str, tmp_path: Path) -> Iterator[Release]:
    tmp_path.chmod(0o755)
    found = Release(cluster, cluster_namespace, tmp_path)
    found.load_images()
    found.provide_volumes()
    yield found
    found.remove_cluster_objects()
    found.remove_volumes()


class Company:
    """What is there before the yard: servers behind TLS, an authority, secrets."""

    def __init__(self, release: Release, stores: Stores) -> None:
        self.release = release
        self.stores = stores
        self.now = datetime.datetime.now(datetime.UTC)
        self.authority = certificates.make_authority("company", self.now)
        self.token = secrets.token_urlsafe(20)

    def certificate(self, *hosts: str) -> Pair:
        return certificates.issue(self.authority, "server", hosts, self.now, 30)

    def secret(self, name: str, **data: str) -> None:
        encoded = {key: base64.b64encode(value.encode()).decode() for key, value in data.items()}
        metadata = {"name": name, "namespace": self.release.namespace}
        self.release.cluster.apply({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": encoded})

    def open(self, stack: ExitStack) -> str:
        """Starts the fronts and makes the secrets; returns the endpoint of S3."""
        address = self.release.cluster.gateway_address
        pair = self.certificate(address)

        def front(port: int, *protocols: str) -> str:
            return f"{address}:{stack.enter_context(tls_front(address, port, pair, self.release.folder, protocols))}"

        def port_of(url: str) -> int:
            return int(url.rpartition(":")[2].partition("/")[0])

        postgres = front(port_of(self.stores.databases["scheduler"]), "postgresql")
        checks = "sslmode=verify-full&sslnegotiation=direct&sslrootcert=/etc/trainyard/postgresql/ca.crt"
        databases = {name: _moved(url, postgres, checks) for name, url in self.stores.databases.items()}
        redis = front(port_of(self.stores.broker_url))
        checks = "ssl_cert_reqs=required&ssl_ca_certs=/etc/trainyard/redis/ca.crt"
        broker = _moved(self.stores.broker_url, redis, checks).replace("redis://", "rediss://")
        bucket = self.stores.bucket
        own = [f"yard-trainyard-{name}.{self.release.namespace}.svc" for name in _SERVICES]
        certificate = self.certificate(*own, "localhost")
        root = self.authority.certificate.decode()
        self.secret("company-ca", **{"ca.crt": root})
        self.secret("databases", **databases)
        self.secret("broker", url=broker)
        self.secret("bucket", **{"access-key-id": bucket.access_key, "secret-access-key": bucket.secret_key})
        self.secret("users", token=self.token)
        parts = {"tls.crt": certificate.certificate.decode(), "tls.key": certificate.key.decode(), "ca.crt": root}
        self.secret("certificate", **parts)
        return f"https://{front(port_of(bucket.endpoint))}"


_SERVICES = ("gateway", "scheduler", "launcher", "metrics", "artifacts", "operator")


def _moved(url: str, address: str, query: str) -> str:
    """The same URL at another address."""
    head, _, tail = url.rpartition("@")
    return f"{head}@{address}/{tail.partition('/')[2]}?{query}"


def test_it_works_with_servers_and_secrets_of_others(release: Release, make_stores: Callable[[], Stores]) -> None:
    stores = make_stores()
    company = Company(release, stores)
    with ExitStack() as stack:
        endpoint = company.open(stack)
        release.install(
            storage={"className": release.namespace},
            database={"kind": "postgresql", "existingSecret": "databases", "caSecret": "company-ca"},
            redis={"enabled": False, "existingSecret": "broker", "caSecret": "company-ca"},
            s3={
                "bucket": stores.bucket.name,
                "endpoint": endpoint,
                "region": stores.bucket.region,
                "existingSecret": "bucket",
                "caSecret": "company-ca",
            },
            token={"existingSecret": "users"},
            tls={"existingSecret": "certificate"},
            scheduler={"replicas": 2},
            gateway={"replicas": 1},
        )
        release.helm("test", release.name, f"--timeout={int(PATIENCE_S)}s")
        assert release.secrets().keys() == {
            *("company-ca", "databases", "broker", "bucket", "users", "certificate"),
            *("yard-trainyard-attempt-key", "yard-trainyard-operator-token", "yard-trainyard-scrape-token"),
        }
        with release.client(company.token) as client:
            kept = 'open("result.txt", "w").write("trained")'
            job = client.submit(small_job(kept, outputs=[{"path": "result.txt", "artifact": "result"}]))
            assert job.wait(PATIENCE_S, check=False).reason == "Completed"
        assert any(path.is_file() for path in stores.folder.rglob("*"))

        for number in range(2):  # one of them was the active one
            release.kubectl("delete", "pod", f"yard-trainyard-scheduler-{number}", "--wait")
            with release.client(company.token) as client:
                wait_until(lambda: serves(client), "a scheduler to take over")
                job = client.submit(small_job("print('again')", name=f"again-{number}"))
                assert job.wait(PATIENCE_S, check=False).reason == "Completed"

        release.uninstall()
        assert "yard-trainyard-attempt-key" not in release.secrets()
        assert "databases" in release.secrets()


def serves(client: Client) -> bool:
    try:
        return bool(client.pools())
    except YardError:
        return False
