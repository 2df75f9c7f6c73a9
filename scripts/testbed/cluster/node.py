"""A node that runs pods: containerd, kubelet and kube-proxy on a machine of their own."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from scripts.testbed.cluster import binaries, certificates, cgroups, images, proxy
from scripts.testbed.cluster.api import Client
from scripts.testbed.cluster.machine import Machine

KUBELET = "kubelet"
CONTAINERD = "containerd"
RUNC = Path("/usr/sbin/runc")
CNI = Path("/usr/lib/cni")


def ready(node: dict[str, Any]) -> bool:
    """Whether a Node, as the API server describes it, is Ready."""
    conditions = node.get("status", {}).get("conditions", [])
    return any(item["type"] == "Ready" and item["status"] == "True" for item in conditions)


class Node(Machine):
    """A node of the cluster; each has a containerd, folders, addresses and a group of its own."""

    @property
    def socket(self) -> Path:
        """On which its containerd listens."""
        return self.folder / "containerd.sock"

    def prepare(self) -> None:
        """Boots it with containerd and the images that every node has, whatever of it is missing; raises Failed."""
        cgroups.make(f"{self.layout.name}/{self.name}")
        self.boot()
        if not self.runs(CONTAINERD):
            self._start_containerd()
        # Also of one that runs: who started it may have been killed before it had its images.
        self.wait_ready(CONTAINERD, lambda: self.succeeds(self._ctr("version")))
        if not {images.PAUSE, images.BUSYBOX} <= set(self.images()):
            for archive in images.built_in():
                self.load_image(archive)

    def _start_containerd(self) -> None:
        self._write_network()
        file = self.folder / "containerd.toml"
        file.write_text(self._containerd())
        program = binaries.containerd.program(CONTAINERD)
        path = f"{program.parent}:/usr/sbin:/usr/bin:/sbin:/bin"
        self.start(CONTAINERD, [str(program), "--config", str(file), "--log-level=warn"], {"PATH": path})

    def join(self, **settings: Any) -> None:
        """Starts the kubelet, when the API server serves, and returns when the node is Ready; raises Failed.

        Args:
            settings: of the kubelet, in the place of those that it has here; of no account for one that runs.
        """
        began = datetime.now(UTC)
        spoke_after = began if self._start_kubelet(settings) else None
        self.wait_ready(KUBELET, lambda: self._is_ready(spoke_after))

    def _start_kubelet(self, settings: dict[str, Any]) -> bool:
        file, resolver = self.folder / "kubelet.json", self.folder / "resolv.conf"
        file.write_text(json.dumps(self._kubelet(resolver) | settings, indent=1))
        resolver.write_text("")
        command = [
            str(binaries.kubernetes.program(KUBELET)),
            *(f"--config={file}", f"--root-dir={self.folder / 'kubelet'}"),
            *(f"--kubeconfig={certificates.kubeconfig(self.layout, self.name)}", f"--hostname-override={self.name}"),
            f"--node-ip={self.address}",
        ]
        return self.start(KUBELET, command)

    def _is_ready(self, spoke_after: datetime | None) -> bool:
        # A node that was off is still called what it was called before, until its kubelet speaks.
        client = Client(self.layout)
        lease = client.find(f"/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/{self.name}")
        found = client.find(f"/api/v1/nodes/{self.name}")
        if lease is None or found is None:
            return False
        if spoke_after is not None and datetime.fromisoformat(lease["spec"]["renewTime"]) < spoke_after:
            return False
        return ready(found)

    def start_proxy(self) -> None:
        """Starts kube-proxy, when the node is registered."""
        proxy.start(self, self.name)

    def load_image(self, archive: Path) -> None:
        """Takes the images of an archive, of Docker's or of the OCI's form; raises Failed."""
        self.run(self._ctr("images", "import", "--local", str(archive)))

    def remove_image(self, name: str) -> None:
        """Forgets an image, with what only it needs once no pod uses it, or does nothing; raises Failed."""
        listed = [line.split() for line in self.run(self._ctr("images", "list")).splitlines()[1:]]
        digests = {digest for each, _, digest, *_ in listed if each == name}
        # The kubelet's side of containerd keeps every image under its digest as well.
        if names := [each for each, _, digest, *_ in listed if digest in digests]:
            self.run(self._ctr("images", "remove", "--sync", *names))

    def images(self) -> list[str]:
        """The names of the images that it has; raises Failed."""
        listed = self.run(self._ctr("images", "list", "--quiet")).split()
        return sorted(name for name in listed if not name.startswith("sha256:"))

    def _ctr(self, *arguments: str) -> list[str]:
        return [str(binaries.containerd.program("ctr")), f"--address={self.socket}", "--namespace=k8s.io", *arguments]

    def _write_network(self) -> None:
        leases = {
            "type": "host-local",
            "dataDir": str(self.folder / "leases"),
            "ranges": [[{"subnet": self.layout.pods(self.name)}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        }
        # Routed, not bridged: so packets between two pods of a node pass the rules of kube-proxy.
        plugins = [{"type": "ptp", "ipam": leases}, {"type": "portmap", "capabilities": {"portMappings": True}}]
        folder = self.folder / "cni"
        folder.mkdir(exist_ok=True)
        config = {"cniVersion": "1.0.0", "name": "pods", "plugins": plugins}
        (folder / "pods.conflist").write_text(json.dumps(config, indent=1))

    def _containerd(self) -> str:
        return f"""version = 3
root = "{self.folder / "containerd"}"
state = "/run/containerd"

[grpc]
address = "{self.socket}"

[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "{images.PAUSE}"

[plugins."io.containerd.cri.v1.runtime"]
restrict_oom_score_adj = true

[plugins."io.containerd.cri.v1.runtime".cni]
bin_dirs = ["{CNI}"]
conf_dir = "{self.folder / "cni"}"

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
BinaryName = "{RUNC}"
SystemdCgroup = false
"""

    def _kubelet(self, resolver: Path) -> dict[str, Any]:
        serving = certificates.pair(self.layout, self.name)
        authority = certificates.pair(self.layout, "ca").certificate
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": self.address,
            "containerRuntimeEndpoint": f"unix://{self.socket}",
            "podLogsDir": str(self.folder / "pod-logs"),
            "volumePluginDir": str(self.folder / "volume-plugins"),
            "authentication": {"x509": {"clientCAFile": str(authority)}, "webhook": {"enabled": True}},
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": str(serving.certificate),
            "tlsPrivateKeyFile": str(serving.key),
            "clusterDomain": "cluster.local",
            "clusterDNS": [self.layout.dns_service],
            "resolvConf": str(resolver),
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self.layout.name}/{self.name}",
            "failCgroupV1": False,
            "failSwapOn": False,
            "enforceNodeAllocatable": [],
            "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
            # There is no registry from which an image that was removed could come back.
            "imageGCHighThresholdPercent": 100,
            # Else a node that starts says only after 10 s that it is ready.
            "nodeStatusUpdateFrequency": "2s",
            "serializeImagePulls": False,
            "maxPods": 200,
        }
