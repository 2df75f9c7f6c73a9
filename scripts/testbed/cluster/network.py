"""The wires of a cluster: a bridge on the host, and a cable from it to each machine.

Packets between pods of different machines are routed by the machines themselves. The host has routes to the pods and,
over the control machine, to the Services, but forwards nothing: no packet leaves the cluster.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

from scripts.testbed.cluster.layout import CONTROL, NODES, Layout
from scripts.testbed.cluster.processes import Failed


def lay(layout: Layout) -> None:
    """Makes the bridge with the host's address and routes, when it is not there; raises Failed."""
    if _exists(layout.name):
        return
    _ip("link", "add", layout.name, "address", _hardware_address(layout.gateway), "type", "bridge")
    _ip("address", "add", f"{layout.gateway}/24", "dev", layout.name)
    _ip("link", "set", layout.name, "up")
    for network, machine in _routes(layout):
        _ip("route", "replace", network, "via", layout.address(machine))


def connect(layout: Layout, machine: str, pid: int) -> None:
    """Lays the cable of a machine: its interface eth0 with address and routes; raises Failed.

    Args:
        layout: of the cluster.
        machine: its name.
        pid: of a process in its network namespace.
    """
    link, address = layout.link(machine), layout.address(machine)
    _delete(link)
    _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
    _ip("link", "set", link, "master", layout.name, "up")
    inside = ["nsenter", f"--target={pid}", "--net", "--"]
    _ip("link", "set", "eth0", "address", _hardware_address(address), "up", inside=inside)
    _ip("address", "add", f"{address}/24", "dev", "eth0", inside=inside)
    _ip("route", "add", "default", "via", layout.gateway, inside=inside)
    for network, other in _routes(layout):
        if other not in (machine, CONTROL):
            _ip("route", "add", network, "via", layout.address(other), inside=inside)


def remove(layout: Layout) -> None:
    """Takes away the bridge, the cables and so the routes; raises Failed."""
    for name in (*map(layout.link, (CONTROL, *NODES)), layout.name):
        _delete(name)


def _routes(layout: Layout) -> Iterator[tuple[str, str]]:
    yield layout.services, CONTROL
    for node in NODES:
        yield layout.pods(node), node


def _hardware_address(address: str) -> str:
    # Made from the address: a machine that boots again is where its neighbours remember it.
    return ":".join(["02", "00", *(f"{int(part):02x}" for part in address.split("."))])


def _delete(device: str) -> None:
    # The kernel takes the cable of a machine that was switched off away by itself, at a moment of its own.
    try:
        _ip("link", "delete", device)
    except Failed:
        if _exists(device):
            raise


def _exists(device: str) -> bool:
    return subprocess.run(["ip", "link", "show", "dev", device], capture_output=True).returncode == 0


def _ip(*arguments: str, inside: list[str] | None = None) -> None:
    done = subprocess.run([*(inside or []), "ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise Failed(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
