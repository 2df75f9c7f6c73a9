"""A Kubernetes cluster on this machine: a control machine and two nodes that run pods, on a bridge.

    host 10.88.0.1 ── bridge ─┬─ control 10.88.0.10: etcd, API server, controllers, scheduler, CoreDNS, kube-proxy
                              ├─ node-1  10.88.0.11: containerd, kubelet, kube-proxy, pods 10.88.129.0/24
                              └─ node-2  10.88.0.12: containerd, kubelet, kube-proxy, pods 10.88.130.0/24

`up` brings what is missing, so it also mends a cluster of which parts were killed. `down` needs nothing but the number
of the cluster: processes are found by their mark, the rest by its name.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from scripts.testbed import fetch
from scripts.testbed.cluster import (
    binaries,
    certificates,
    cgroups,
    kwok,
    locks,
    machine,
    manifests,
    network,
    node,
    processes,
    system,
)
from scripts.testbed.cluster.api import Client
from scripts.testbed.cluster.controlplane import API_SERVER, ControlPlane
from scripts.testbed.cluster.layout import CONTROL, NODES, NUMBER, RUNTIME, Layout
from scripts.testbed.cluster.node import Node
from scripts.testbed.runs import run

# Changes with what `up` writes: a cluster that another version of this program made is taken down first.
_FORMAT = "2"
_KUBECTL_S = 600
_RUN_LABEL = "trainyard.test/run"


class Cluster:
    """The cluster of a number; the same object whether it is up or not.

    Args:
        layout: of it; without it the one that the environment names.
    """

    def __init__(self, layout: Layout | None = None) -> None:
        self.layout = layout or Layout.chosen()
        self.control = ControlPlane(self.layout)
        self._nodes = {name: Node(self.layout, name) for name in NODES}
        self._for_tests = self.layout.folder / "for-tests"
        self._stamp = self.layout.folder / "format"

    @property
    def kubeconfig(self) -> Path:
        """For a client on the host that may do everything."""
        return self.layout.kubeconfig

    @property
    def nodes(self) -> tuple[str, ...]:
        """The names of the nodes that run pods."""
        return NODES

    @property
    def gateway_address(self) -> str:
        """The address of the host that pods can reach: a server of a test listens there."""
        return self.layout.gateway

    @property
    def dns(self) -> str:
        """The address of the cluster's name server, from the host and from pods."""
        return self.layout.address(CONTROL)

    def command(self, *arguments: str) -> list[str]:
        """The command line of `python -m scripts.testbed` on this cluster, to be run in the checkout."""
        return ["env", f"{NUMBER}={self.layout.number}", sys.executable, "-m", "scripts.testbed", *arguments]

    def up(self, fake_nodes: int = 0, *, for_tests: bool = False) -> None:
        """Starts whatever does not run, and returns when the cluster is ready for pods.

        Args:
            fake_nodes: so many nodes of kwok are there afterwards; those that are there already stay.
            for_tests: `down_after_tests` may end it, when it was not there before.

        Raises:
            fetch.Unavailable: something that it needs cannot be had.
            processes.Failed: a part does not start; the end of its log is in the message.
        """
        if obstacle := system.obstacle():
            raise fetch.Unavailable(obstacle)
        system.get((*binaries.CLUSTER, *([binaries.kwok] if fake_nodes else [])))
        with locks.changing(self.layout):
            self._begin(for_tests)
            network.lay(self.layout)
            certificates.make(self.layout)
            with ThreadPoolExecutor(len(NODES)) as threads:
                preparing = [threads.submit(item.prepare) for item in self._nodes.values()]
                self._start_control()
                for prepared in preparing:
                    prepared.result()
                for joined in [threads.submit(self._join, name) for name in NODES]:
                    joined.result()
            self.control.start_proxy()
            self.wait_for_service_account("default")
            if fake_nodes:
                self._add_fake_nodes(fake_nodes)

    def down(self) -> None:
        """Ends it and removes everything that it made on this machine; raises processes.Failed."""
        with locks.changing(self.layout):
            self._remove()

    def down_after_tests(self, killed: str = "") -> None:
        """Ends it when it was started for tests and no session of tests uses it any more; raises processes.Failed.

        One that is there in part, because its start or its end was interrupted, goes as well.

        Args:
            killed: the name of a run of tests that was killed; its namespaces go when the cluster stays.
        """
        with locks.changing(self.layout):
            if not self.layout.folder.exists():
                return
            temporary = self._for_tests.exists() or not self._stamp.exists()
            if temporary and not locks.used(self.layout):
                self._remove()
            elif killed:
                self.kubectl("delete", "namespaces", f"--selector={_RUN_LABEL}={killed}", "--wait=false")

    def status(self) -> dict[str, list[str]]:
        """The parts that run, by machine; a machine that is off has none."""
        running: dict[str, list[str]] = {name: [] for name in (CONTROL, *NODES)}
        for mark in processes.leaders(f"{self.layout.number}/"):
            _, name, part = mark.split("/")
            running[name].append(part)
        return running

    def whole(self) -> bool:
        """Whether every part runs that `up` starts."""
        parts = self.status()
        wanted = {CONTROL: {API_SERVER, "etcd", "kube-controller-manager", "kube-scheduler", "coredns", "kube-proxy"}}
        wanted |= {name: {node.CONTAINERD, node.KUBELET, "kube-proxy"} for name in NODES}
        return all(some <= set(parts[name]) for name, some in wanted.items())

    def kubectl(self, *arguments: str, input: str | None = None, check: bool = True) -> str:
        """Runs kubectl as the administrator.

        Args:
            arguments: its own.
            input: what it reads on standard input.
            check: whether a failure raises.

        Returns:
            What it printed; with what it said about a failure, when that does not raise.

        Raises:
            processes.Failed: it ended with another code than 0.
        """
        command = [str(binaries.kubernetes.program("kubectl")), f"--kubeconfig={self.kubeconfig}", *arguments]
        done = subprocess.run(command, input=input or "", capture_output=True, text=True, timeout=_KUBECTL_S)
        if done.returncode and check:
            raise processes.Failed(f"kubectl {' '.join(arguments)} ended with {done.returncode}:\n{done.stderr}")
        return done.stdout if done.returncode == 0 else done.stdout + done.stderr

    def get(self, *arguments: str) -> dict[str, Any]:
        """What `kubectl get ... --output=json` says, read; raises as `kubectl`."""
        found: dict[str, Any] = json.loads(self.kubectl("get", *arguments, "--output=json"))
        return found

    def apply(self, *objects: dict[str, Any]) -> None:
        """Applies objects, server-side; raises as `kubectl`."""
        what = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
        self.kubectl("apply", "--server-side", "--force-conflicts", "--filename=-", input=what)

    def create_namespace(self, name: str) -> None:
        """Creates a namespace, which is removed when this run of tests is killed; raises as `kubectl`."""
        metadata = {"name": name, "labels": {_RUN_LABEL: run.name()}}
        item = {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}
        self.kubectl("create", "--filename=-", input=json.dumps(item))

    def wait_for_service_account(self, namespace: str) -> None:
        """Returns when pods can be made in a namespace: it has its service account; raises processes.Failed."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/default"
        client = Client(self.layout)
        processes.wait_for(lambda: client.find(path) is not None, f"service account of {namespace}")

    def load_image(self, archive: Path, *nodes: str) -> None:
        """Gives nodes, all without names, the images of a Docker or OCI archive; raises processes.Failed."""
        for name in nodes or self.nodes:
            self._nodes[name].load_image(archive)

    def remove_image(self, name: str) -> None:
        """Takes an image from all nodes, with what only it needs once no pod uses it; raises processes.Failed."""
        for item in self._nodes.values():
            item.remove_image(name)

    def images(self) -> dict[str, list[str]]:
        """The names of the images that each node has; raises processes.Failed."""
        return {name: item.images() for name, item in self._nodes.items() if item.on}

    def stop_node(self, name: str) -> None:
        """Switches a node off as a power cut would: its pods end at once, and nobody says so."""
        self._nodes[name].off()

    def start_node(self, name: str) -> None:
        """Switches a node on again, when it is off, and returns when it is Ready; raises processes.Failed."""
        self._nodes[name].prepare()
        self._join(name)

    def stop_part(self, machine_name: str, part: str) -> None:
        """Kills one process, such as the kubelet of `node-1`, whose pods then go on without it."""
        self._machine(machine_name).stop(part)

    def restart_kubelet(self, name: str, **settings: Any) -> None:
        """Kills a node's kubelet and starts it again, whose pods go on meanwhile; raises processes.Failed.

        Args:
            settings: of the kubelet from now on, in the place of those that it has here, such as `evictionHard`.
        """
        self._nodes[name].stop(node.KUBELET)
        self._nodes[name].join(**settings)

    def stop_api(self) -> None:
        """Kills the API server; etcd, the nodes and the pods go on."""
        self.control.stop(API_SERVER)

    def start_api(self) -> None:
        """Starts the API server again and returns when it serves; raises processes.Failed."""
        self.control.start_api()
        self.control.start_controllers()

    def _machine(self, name: str) -> machine.Machine:
        return self.control if name == CONTROL else self._nodes[name]

    def _start_control(self) -> None:
        self.control.boot()
        self.control.start_api()
        self.control.start_controllers()
        client = Client(self.layout)
        for path, item in manifests.basics(self.layout).items():
            client.make(path, item)

    def _join(self, name: str) -> None:
        self._nodes[name].join()
        self._nodes[name].start_proxy()

    def _add_fake_nodes(self, count: int) -> None:
        kwok.start(self.control)
        self.apply(*kwok.nodes(count)["items"])
        self.control.wait_ready(kwok.NAME, lambda: self._ready_fake_nodes() >= count)

    def _ready_fake_nodes(self) -> int:
        found = Client(self.layout).find(f"/api/v1/nodes?labelSelector={kwok.LABEL}%3Dkwok")
        return sum(node.ready(item) for item in found["items"]) if found else 0

    def _begin(self, for_tests: bool) -> None:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        wanted = f"{_FORMAT} {binaries.KUBERNETES} {boot}"
        if not self._stamp.exists() or self._stamp.read_text() != wanted:
            self._remove()
            self.layout.folder.mkdir(parents=True)
            if for_tests:
                self._for_tests.touch()
            self._stamp.write_text(wanted)
        elif not for_tests:
            self._for_tests.unlink(missing_ok=True)

    def _remove(self) -> None:
        self._stamp.unlink(missing_ok=True)  # without it, what an interrupted removal leaves is no cluster
        processes.kill_all(f"{self.layout.number}/")
        network.remove(self.layout)
        cgroups.remove(self.layout.name)
        if self.layout.folder.exists():
            shutil.rmtree(self.layout.folder)
        with suppress(OSError):  # not while another cluster has something there
            RUNTIME.rmdir()
            machine.VOLUMES.rmdir()
