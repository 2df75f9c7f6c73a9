"""Where the parts of one cluster are: its number, folders, names and addresses. Nothing here touches the machine.

Clusters with different numbers share nothing, so that several can run at once.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

RUNTIME = Path("/var/tmp/trainyard-testbed")
CONTROL = "control"
NODES = ("node-1", "node-2")
MOST_CLUSTERS = 10
NUMBER = "TRAINYARD_TESTBED_CLUSTER"


class Wrong(ValueError):
    """A setting of the testbed that cannot be."""


@dataclass(frozen=True)
class Layout:
    """The layout of one cluster.

    Args:
        number: of the cluster, 0 to 9.
    """

    number: int

    @classmethod
    def chosen(cls) -> Layout:
        """The cluster that the environment variable TRAINYARD_TESTBED_CLUSTER names; 0 without it.

        Raises:
            Wrong: it is no number from 0 to 9.
        """
        text = os.environ.get(NUMBER, "0")
        if text not in map(str, range(MOST_CLUSTERS)):
            raise Wrong(f"{NUMBER}={text}: give a number from 0 to {MOST_CLUSTERS - 1}")
        return cls(int(text))

    @cached_property
    def name(self) -> str:
        """Of its bridge and its cgroups: 10 characters."""
        return f"trainyard{self.number}"

    @cached_property
    def folder(self) -> Path:
        """Everything that it writes is below."""
        return RUNTIME / str(self.number)

    @property
    def kubeconfig(self) -> Path:
        """Of a user who may do everything."""
        return self.folder / "kubeconfig"

    def machine_folder(self, machine: str) -> Path:
        """What a machine keeps when it is off."""
        return self.folder / machine

    def log(self, machine: str, part: str) -> Path:
        """What a part of a machine prints."""
        return self.folder / "logs" / f"{machine}-{part}.log"

    @property
    def network(self) -> str:
        """The bridge's network: the addresses of machines and pods."""
        return f"10.{88 + self.number}.0.0/16"

    @property
    def gateway(self) -> str:
        """The address of the host on the bridge: pods reach the host's servers there."""
        return f"10.{88 + self.number}.0.1"

    def address(self, machine: str) -> str:
        """The address of a machine on the bridge."""
        return f"10.{88 + self.number}.0.{10 + self._index(machine)}"

    def pods(self, node: str) -> str:
        """The network of a node's pods."""
        return f"10.{88 + self.number}.{128 + self._index(node)}.0/24"

    @property
    def all_pods(self) -> str:
        """The network of every pod."""
        return f"10.{88 + self.number}.128.0/17"

    @property
    def fake_pods(self) -> str:
        """The network from which pods on fake nodes get their addresses."""
        return f"10.{88 + self.number}.192.0/18"

    @property
    def services(self) -> str:
        """The network of the Services."""
        return f"10.{108 + self.number}.0.0/16"

    @property
    def api_service(self) -> str:
        """The address of the Service `kubernetes`."""
        return f"10.{108 + self.number}.0.1"

    @property
    def dns_service(self) -> str:
        """The address of the Service `kube-dns`."""
        return f"10.{108 + self.number}.0.10"

    @property
    def api(self) -> str:
        """The URL of the API server."""
        return f"https://{self.address(CONTROL)}:6443"

    def link(self, machine: str) -> str:
        """The host's end of a machine's cable; at most 15 characters."""
        return f"ty{self.number}-{machine}"

    def _index(self, machine: str) -> int:
        return (CONTROL, *NODES).index(machine)
