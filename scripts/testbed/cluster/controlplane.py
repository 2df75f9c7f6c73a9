"""The machine `control`: etcd, the API server, the controller manager, the scheduler and CoreDNS."""

from __future__ import annotations

import json

from scripts.testbed.cluster import binaries, certificates, proxy
from scripts.testbed.cluster.api import Client
from scripts.testbed.cluster.layout import CONTROL, NODES, Layout
from scripts.testbed.cluster.machine import Machine

API_SERVER = "kube-apiserver"
# Else these clients' own limits would be what a benchmark measures.
_REQUESTS_PER_S = 5000


class ControlPlane(Machine):
    """The control machine of a cluster."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout, CONTROL)

    def start_api(self) -> None:
        """Starts etcd and the API server, those that do not run, and returns when it serves; raises Failed."""
        self.start("etcd", self._etcd())
        self.start(API_SERVER, self._api_server())
        self.wait_ready(API_SERVER, Client(self.layout).ready)

    def start_controllers(self) -> None:
        """Starts the rest, when the API server serves; raises Failed."""
        self.start("kube-controller-manager", self._controller_manager())
        self.start("kube-scheduler", self._scheduler())
        self.start("coredns", self._coredns())

    def start_proxy(self) -> None:
        """Starts the way from the host to Services, when the first node is there."""
        # It stands in for a node: what it does depends on the node's name in nothing else than whose events it writes.
        proxy.start(self, NODES[0])

    def _etcd(self) -> list[str]:
        client, peer = "http://127.0.0.1:2379", "http://127.0.0.1:2380"
        return [
            str(binaries.etcd.program("etcd")),
            f"--data-dir={self.folder / 'etcd'}",
            *(f"--listen-client-urls={client}", f"--advertise-client-urls={client}"),
            *(f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"),
            *(f"--initial-cluster=default={peer}", "--unsafe-no-fsync", "--log-level=warn"),
        ]

    def _api_server(self) -> list[str]:
        serving, kubelets = (certificates.pair(self.layout, name) for name in ("apiserver", "apiserver-kubelet"))
        tokens, authority = (certificates.pair(self.layout, name) for name in ("service-accounts", "ca"))
        return [
            str(binaries.kubernetes.program(API_SERVER)),
            "--etcd-servers=http://127.0.0.1:2379",
            f"--advertise-address={self.address}",
            f"--service-cluster-ip-range={self.layout.services}",
            *("--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction"),
            "--allow-privileged=true",
            # It calls webhooks by the addresses of their pods: there is no way to Services on the machine itself.
            "--enable-aggregator-routing=true",
            f"--client-ca-file={authority.certificate}",
            f"--tls-cert-file={serving.certificate}",
            f"--tls-private-key-file={serving.key}",
            f"--kubelet-certificate-authority={authority.certificate}",
            f"--kubelet-client-certificate={kubelets.certificate}",
            f"--kubelet-client-key={kubelets.key}",
            # Nobody resolves the names of the nodes.
            "--kubelet-preferred-address-types=InternalIP",
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
            f"--service-account-key-file={tokens.certificate}",
            f"--service-account-signing-key-file={tokens.key}",
        ]

    def _controller_manager(self) -> list[str]:
        authority, tokens = (certificates.pair(self.layout, name) for name in ("ca", "service-accounts"))
        return [
            str(binaries.kubernetes.program("kube-controller-manager")),
            f"--kubeconfig={certificates.kubeconfig(self.layout, 'kube-controller-manager')}",
            *("--leader-elect=false", "--use-service-account-credentials=true", "--bind-address=127.0.0.1"),
            f"--service-account-private-key-file={tokens.key}",
            f"--root-ca-file={authority.certificate}",
            f"--cluster-signing-cert-file={authority.certificate}",
            f"--cluster-signing-key-file={authority.key}",
            "--enable-hostpath-provisioner=true",
            f"--kube-api-qps={_REQUESTS_PER_S}",
            f"--kube-api-burst={_REQUESTS_PER_S}",
            "--concurrent-job-syncs=20",
        ]

    def _scheduler(self) -> list[str]:
        connection = {
            "kubeconfig": str(certificates.kubeconfig(self.layout, "kube-scheduler")),
            "qps": _REQUESTS_PER_S,
            "burst": _REQUESTS_PER_S,
        }
        config = {
            "apiVersion": "kubescheduler.config.k8s.io/v1",
            "kind": "KubeSchedulerConfiguration",
            "leaderElection": {"leaderElect": False},
            "clientConnection": connection,
        }
        file = self.folder / "scheduler.json"
        file.write_text(json.dumps(config, indent=1))
        return [str(binaries.kubernetes.program("kube-scheduler")), f"--config={file}", "--bind-address=127.0.0.1"]

    def _coredns(self) -> list[str]:
        file = self.folder / "Corefile"
        file.write_text(_corefile(certificates.kubeconfig(self.layout, certificates.ADMIN).as_posix()))
        return [str(binaries.coredns.program("coredns")), "-conf", str(file)]


def _corefile(kubeconfig: str) -> str:
    # There is no server to ask for other names. Without an answer resolvers would try again for seconds.
    return f"""cluster.local:53 in-addr.arpa:53 {{
    errors
    kubernetes {{
        kubeconfig {kubeconfig}
        pods insecure
        ttl 1
    }}
}}
.:53 {{
    errors
    template ANY ANY {{
        rcode NXDOMAIN
    }}
}}
"""
