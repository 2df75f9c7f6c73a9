"""What the testbed can take away from a cluster, and bring back."""

import pytest

from tests.conftest import wait_until
from tests.testbed.kubernetes import SERVE, Namespace, pod

pytestmark = pytest.mark.timeout(1200)  # on a busy machine a start takes minutes

PATIENCE_S = 240


@pytest.fixture
def namespace(cluster_alone, cluster_namespace):
    return Namespace(cluster_alone, cluster_namespace)


def ready(cluster, node):
    query = '{.status.conditions[?(@.type=="Ready")].status}'
    return cluster.kubectl("get", "node", node, f"--output=jsonpath={query}")


def test_a_lost_node_is_not_ready_and_comes_back(cluster_alone, namespace):
    lost, other = cluster_alone.nodes
    namespace.apply(pod("stays", "exec sleep 3600", other))
    namespace.wait("condition=Ready", "pod/stays")
    cluster_alone.stop_node(lost)
    wait_until(lambda: ready(cluster_alone, lost) == "Unknown", f"{lost} to be lost", PATIENCE_S)
    assert ready(cluster_alone, other) == "True"
    assert namespace.kubectl("exec", "stays", "--", "echo", "here") == "here\n"
    cluster_alone.start_node(lost)
    namespace.apply(pod("again", "echo again", lost))
    assert namespace.printed("again") == "again\n"


def test_a_killed_kubelet_leaves_its_pods_alone(cluster_alone, namespace):
    node = cluster_alone.nodes[1]
    namespace.apply(pod("goes-on", SERVE, node))
    namespace.wait("condition=Ready", "pod/goes-on")
    address = namespace.kubectl("get", "pod", "goes-on", "--output=jsonpath={.status.podIP}")
    cluster_alone.stop_part(node, "kubelet")
    ask = f"until wget -q -O - http://{address}:8080 2> /dev/null; do sleep 0.2; done"
    namespace.apply(pod("asks", ask, cluster_alone.nodes[0]))
    assert namespace.printed("asks") == "from goes-on\n"
    cluster_alone.start_node(node)
    restarts = "--output=jsonpath={.status.containerStatuses[0].restartCount} {.status.phase}"
    assert namespace.kubectl("get", "pod", "goes-on", restarts) == "0 Running"


def test_nodes_and_pods_go_on_while_the_api_server_is_down(cluster_alone, namespace):
    namespace.apply(pod("waits", "until test -e /tmp/go; do sleep 0.2; done; echo went on"))
    namespace.wait("condition=Ready", "pod/waits")
    namespace.kubectl("exec", "waits", "--", "sh", "-c", "(sleep 1; touch /tmp/go) > /dev/null 2>&1 &")
    cluster_alone.stop_api()
    assert "refused" in cluster_alone.kubectl("get", "nodes", check=False)
    cluster_alone.start_api()
    assert namespace.printed("waits") == "went on\n"
