"""A cluster comes and goes as a whole, whatever happened to it. These tests have one of their own."""

import os
import subprocess
import sys

import pytest

from scripts.testbed.cluster import kwok, network, processes, system
from scripts.testbed.cluster.cluster import Cluster
from scripts.testbed.cluster.layout import Layout, Wrong
from scripts.testbed.runs.run import cleaned_up_if_killed
from tests.conftest import REPOSITORY, wait_until
from tests.testbed import remains
from tests.testbed.kubernetes import Namespace, pod

pytestmark = pytest.mark.timeout(1200)  # on a busy machine a start takes minutes

NUMBER = 9

real = pytest.mark.skipif(
    os.environ.get("TRAINYARD_CLUSTER") == "0" or bool(system.obstacle()),
    reason=system.obstacle() or "TRAINYARD_CLUSTER=0 switches the tests on a cluster off",
)


@pytest.fixture
def own_cluster():
    cluster = Cluster(Layout(NUMBER))
    cluster.down()
    with cleaned_up_if_killed(*cluster.command("down")):
        yield cluster
        cluster.down()


def cut_short_at(machine):
    """As `network.connect`, which never gets to one machine."""
    connect = network.connect

    def connect_others(layout, name, pid):
        if name == machine:
            raise processes.Failed("cut short")
        connect(layout, name, pid)

    return connect_others


def up_that_is_killed_at(part):
    """Starts `up` and kills it, not what it started, as soon as a part runs."""
    environ = os.environ | {"TRAINYARD_TESTBED_CLUSTER": str(NUMBER)}
    process = subprocess.Popen([sys.executable, "-m", "scripts.testbed", "up"], env=environ, cwd=REPOSITORY)
    try:
        wait_until(lambda: f"{NUMBER}/{part}" in processes.leaders(f"{NUMBER}/"), f"the start of {part}")
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("number", ["10", "-1", "two", ""])
def test_the_number_of_a_cluster_is_checked(monkeypatch, number):
    monkeypatch.setenv("TRAINYARD_TESTBED_CLUSTER", number)
    with pytest.raises(Wrong, match="0 to 9"):
        Cluster()


@real
def test_down_leaves_nothing(own_cluster):
    before = remains.packet_filter()
    own_cluster.up()
    Namespace(own_cluster, "default").apply(pod("runs", "exec sleep 3600"))
    Namespace(own_cluster, "default").wait("condition=Ready", "pod/runs")
    namespaces = remains.namespaces_of_cluster(own_cluster)
    assert len(namespaces) >= 3 * (1 + len(own_cluster.nodes))
    assert list(remains.of_cluster(own_cluster, namespaces))
    own_cluster.down()
    assert list(remains.of_cluster(own_cluster, namespaces)) == []
    assert remains.packet_filter() == before


@real
def test_up_mends_a_cluster_that_was_killed_and_leaves_a_whole_one_alone(own_cluster, monkeypatch):
    own_cluster.up()
    namespace = Namespace(own_cluster, "default")
    namespace.apply(pod("before", "echo before"))
    assert namespace.printed("before") == "before\n"
    processes.kill_all(f"{NUMBER}/")
    assert not own_cluster.whole()
    with monkeypatch.context() as cut:
        cut.setattr(network, "connect", cut_short_at(own_cluster.nodes[0]))
        with pytest.raises(processes.Failed, match="cut short"):
            own_cluster.up()
    own_cluster.up()
    assert own_cluster.whole()
    running = processes.leaders(f"{NUMBER}/")
    own_cluster.up()
    assert processes.leaders(f"{NUMBER}/") == running
    namespace.apply(pod("after", "echo after"))
    assert namespace.printed("after") == "after\n"
    assert "before" in namespace.kubectl("get", "pods")


@real
@pytest.mark.exhaustive
@pytest.mark.parametrize("part", ["node-1/init", "node-1/containerd", "control/kube-apiserver", "node-1/kubelet"])
def test_an_up_that_was_killed_is_finished_by_the_next_one_and_removed_by_down(own_cluster, part):
    up_that_is_killed_at(part)
    own_cluster.up()
    namespace = Namespace(own_cluster, "default")
    for name in own_cluster.nodes:
        namespace.apply(pod(f"on-{name}", "echo here", name))
        assert namespace.printed(f"on-{name}") == "here\n"
    own_cluster.down()
    up_that_is_killed_at(part)
    namespaces = remains.namespaces_of_cluster(own_cluster)
    own_cluster.down()
    assert list(remains.of_cluster(own_cluster, namespaces)) == []


@real
def test_pods_on_fake_nodes_run_and_end_by_rule(own_cluster):
    own_cluster.up(fake_nodes=2)
    namespace = Namespace(own_cluster, "default")
    tolerant = {
        "tolerations": [{"key": kwok.TAINT, "operator": "Exists"}],
        "nodeSelector": {kwok.LABEL: "kwok"},
    }
    ends = pod("ends", "is never run", **tolerant)
    ends["metadata"]["annotations"] = {kwok.DURATION: "1s"}
    namespace.apply(pod("goes-on", "is never run", **tolerant), ends)
    namespace.wait("condition=Ready", "pod/goes-on")
    namespace.wait("jsonpath={.status.phase}=Succeeded", "pod/ends")
    namespace.kubectl("delete", "pod", "goes-on")
    nodes = own_cluster.get("pod", "ends")["spec"]["nodeName"]
    assert nodes in {"kwok-0", "kwok-1"}
