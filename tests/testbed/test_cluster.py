"""The cluster of the testbed: real nodes, pods, names, Services and volumes."""

import http.server
import threading
import urllib.request

import pytest

from scripts.testbed.cluster import images
from tests.conftest import wait_until
from tests.testbed.kubernetes import SERVE, Namespace, pod, service

pytestmark = pytest.mark.timeout(1200)  # on a busy machine a start takes minutes


@pytest.fixture
def namespace(cluster, cluster_namespace):
    return Namespace(cluster, cluster_namespace)


def test_pods_of_both_nodes_reach_a_service(cluster, namespace):
    namespace.apply(service("web", 8080), pod("web", SERVE, cluster.nodes[0]))
    namespace.wait("condition=Ready", "pod/web")
    for node in cluster.nodes:
        ask = "until wget -q -O - http://web:8080 2> /dev/null; do sleep 0.2; done"
        namespace.apply(pod(f"client-{node}", ask, node))
        assert namespace.printed(f"client-{node}") == "from web\n"


def test_pods_find_each_other_through_a_headless_service(cluster, namespace):
    namespace.apply(
        service("team", 8080, clusterIP="None", selector={"team": "one"}, publishNotReadyAddresses=True),
        *(
            member | {"metadata": {"name": member["metadata"]["name"], "labels": {"team": "one"}}}
            for member in (
                pod("first", SERVE, cluster.nodes[0], hostname="first", subdomain="team"),
                pod(
                    "second",
                    "until wget -q -O - http://first.team:8080 2> /dev/null; do sleep 0.2; done",
                    cluster.nodes[1],
                    hostname="second",
                    subdomain="team",
                ),
            )
        ),
    )
    assert namespace.printed("second") == "from first\n"


def test_a_name_that_is_not_there_is_refused_and_not_ignored(namespace):
    namespace.apply(pod("asks", "nslookup nowhere.example.com || true"))
    assert "NXDOMAIN" in namespace.printed("asks")


def test_kubectl_reads_logs_and_runs_commands_in_pods_of_both_nodes(cluster, namespace):
    for node in cluster.nodes:
        namespace.apply(pod(node, "echo hello; exec sleep 3600", node))
        namespace.wait("condition=Ready", f"pod/{node}")
        wait_until(lambda node=node: namespace.kubectl("logs", node) == "hello\n", f"what {node} printed")
        assert namespace.kubectl("exec", node, "--", "hostname") == f"{node}\n"


def test_pods_and_the_host_reach_each_other(cluster, namespace):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"from the host\n")

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer((cluster.gateway_address, 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        namespace.apply(pod("asks", f"wget -q -O - http://{cluster.gateway_address}:{server.server_port}"))
        assert namespace.printed("asks") == "from the host\n"
        server.shutdown()
        thread.join()
    namespace.apply(service("web", 8080), pod("web", SERVE))
    namespace.wait("condition=Ready", "pod/web")
    for kind, path in (("pod", "{.status.podIP}"), ("service", "{.spec.clusterIP}")):
        address = namespace.kubectl("get", kind, "web", f"--output=jsonpath={path}")
        wait_until(lambda address=address: answer_of(address) == b"from web\n", f"the {kind}'s answer")


def answer_of(address):
    """What a server in a pod says; nothing while it does not listen yet, which it need not do to count as ready."""
    try:
        with urllib.request.urlopen(f"http://{address}:8080", timeout=60) as answer:
            return answer.read()
    except OSError:
        return b""


def test_a_volume_is_the_same_on_both_nodes(cluster, namespace):
    claim = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Mi"}}}
    namespace.apply(
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "shared"}, "spec": claim}
    )
    volume = {"volumes": [{"name": "shared", "persistentVolumeClaim": {"claimName": "shared"}}]}
    for name, script, node in (
        ("writes", "echo kept > /shared/file", cluster.nodes[0]),
        ("reads", "cat /shared/file", cluster.nodes[1]),
    ):
        made = pod(name, script, node, **volume)
        made["spec"]["containers"][0]["volumeMounts"] = [{"name": "shared", "mountPath": "/shared"}]
        namespace.apply(made)
        printed = namespace.printed(name)
    assert printed == "kept\n"


def test_a_loaded_image_runs_on_every_node(cluster, namespace, tmp_path):
    name = "trainyard.test/loaded:1"
    images.write_archive(tmp_path / "image.tar", name, {"bin/busybox": images.busybox(), "bin/sh": "busybox"})
    cluster.load_image(tmp_path / "image.tar")
    for node, has in cluster.images().items():
        assert name in has
        made = pod(node, "echo loaded", node)
        made["spec"]["containers"][0]["image"] = name
        namespace.apply(made)
        assert namespace.printed(node) == "loaded\n"
