"""kube-proxy, which makes the addresses of Services lead to pods, in the packet filter of a machine."""

from __future__ import annotations

import json

from scripts.testbed.cluster import binaries, certificates
from scripts.testbed.cluster.machine import Machine

NAME = "kube-proxy"


def start(machine: Machine, node: str) -> None:
    """Starts it, when it does not run.

    Args:
        machine: where it runs.
        node: the node that it says it is; it has to be registered.
    """
    if machine.runs(NAME):
        return  # it ends when its configuration is written again
    config = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "iptables",
        "hostnameOverride": node,
        "clusterCIDR": machine.layout.all_pods,
        "clientConnection": {"kubeconfig": str(certificates.kubeconfig(machine.layout, NAME))},
        "iptables": {"minSyncPeriod": "100ms"},
        # The table of connections is the kernel's: its size is not ours to set.
        "conntrack": {"maxPerCore": 0, "min": 0},
    }
    file = machine.folder / "proxy.json"
    file.write_text(json.dumps(config, indent=1))
    machine.start(NAME, [str(binaries.kubernetes.program(NAME)), f"--config={file}"])
