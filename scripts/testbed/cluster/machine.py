"""A machine of the cluster: a set of namespaces on this one, with a name, an address and processes of its own.

Its processes, mounts, network devices and packet filter rules live in namespaces, which the kernel removes with the
last process in them. So a machine is switched off by killing its first process, and leaves nothing but its folder. It
sees the files of the host, as a worker on the host would, but has a `/run` of its own, and what it writes to `/var/lib`
and `/var/log` goes to its folder.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from scripts.testbed.cluster import network, processes
from scripts.testbed.cluster.layout import Layout

_NAMESPACES = ("--mount", "--uts", "--ipc", "--net", "--pid")
_INIT = "init"
# The kubelet sets them for the whole kernel: it gets files in their place.
_KERNEL_SETTINGS = (
    *("vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops"),
    *("kernel/keys/root_maxkeys", "kernel/keys/root_maxbytes"),
)
VOLUMES = Path("/tmp/hostpath_pv")
"""Where the controller manager makes volumes; the path is fixed in it."""


class Machine:
    """One machine; the same object whether it is on or off.

    Args:
        layout: of its cluster.
        name: of the machine.
    """

    def __init__(self, layout: Layout, name: str) -> None:
        self.layout = layout
        self.name = name
        self.folder = layout.machine_folder(name)
        self.address = layout.address(name)

    @property
    def on(self) -> bool:
        """Whether it was booted and not switched off."""
        return processes.find(self._mark(_INIT)) is not None

    def boot(self) -> None:
        """Switches it on and connects it to the bridge, when it is not both already.

        Raises:
            processes.Failed: it does not come up.
        """
        if self.on and self._connected.exists():
            return
        self.off()  # a boot that was cut short leaves a machine without a network
        self.folder.mkdir(parents=True, exist_ok=True)
        ready = self.folder / "booted"
        for stamp in (ready, self._connected):
            stamp.unlink(missing_ok=True)
        script = "\n".join(self._boot_script(ready))
        unshare = ["unshare", *_NAMESPACES, "--fork", "--kill-child=KILL", "--propagation=slave", "--mount-proc"]
        log = self.layout.log(self.name, _INIT)
        processes.launch(self._mark(_INIT), [*unshare, "sh", "-ec", script], log)
        processes.wait_for(lambda: ready.exists() or not self.on, f"boot of {self.name}; its log is {log}")
        if not ready.exists():
            raise processes.Failed(f"{self.name} did not boot:\n{processes.tail(log)}")
        network.connect(self.layout, self.name, self._pid())
        self._connected.touch()

    def off(self) -> None:
        """Switches it off as a power cut would."""
        processes.kill_all(self._mark(""))

    def start(self, part: str, command: list[str], environ: Mapping[str, str] | None = None) -> bool:
        """Starts a process in it, when it does not run; returns whether it had to."""
        if self.runs(part):
            return False
        processes.launch(self._mark(part), [*self._enter(), *command], self.log(part), environ)
        return True

    def stop(self, part: str) -> None:
        """Kills a process that was started in it."""
        processes.kill(self._mark(part))

    def runs(self, part: str) -> bool:
        """Whether a process that was started in it still runs."""
        return processes.find(self._mark(part)) is not None

    def log(self, part: str) -> Path:
        """What a process that was started in it prints."""
        return self.layout.log(self.name, part)

    def wait_ready(self, part: str, ready: Callable[[], bool]) -> None:
        """Returns when the part runs and the condition holds.

        Raises:
            processes.Failed: the part ended, or is not ready in time; its log is in the message.
        """
        try:
            processes.wait_for(lambda: ready() or not self.runs(part), f"readiness of {part} of {self.name}")
        except processes.Failed as error:
            raise processes.Failed(f"{error}:\n{processes.tail(self.log(part))}") from error
        if not self.runs(part):
            raise processes.Failed(f"{part} of {self.name} ended:\n{processes.tail(self.log(part))}")

    def succeeds(self, command: list[str]) -> bool:
        """Whether a command that is run in it ends with 0."""
        return self._run(command).returncode == 0

    def run(self, command: list[str]) -> str:
        """Runs a command in it and returns what it prints.

        Raises:
            processes.Failed: it ended with another code than 0.
        """
        done = self._run(command)
        if done.returncode:
            raise processes.Failed(f"{shlex.join(command)} on {self.name} ended with {done.returncode}:\n{done.stderr}")
        return done.stdout

    def _run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*self._enter(), *command], capture_output=True, text=True, stdin=subprocess.DEVNULL)

    def _enter(self) -> list[str]:
        return ["nsenter", f"--target={self._pid()}", *_NAMESPACES, "--"]

    def _pid(self) -> int:
        unshare = processes.find(self._mark(_INIT))
        if unshare is None:
            raise processes.Failed(f"{self.name} is off")
        return unshare.children()[0].pid

    @property
    def _connected(self) -> Path:
        return self.folder / "connected"

    def _mark(self, part: str) -> str:
        return f"{self.layout.number}/{self.name}/{part}"

    def _boot_script(self, ready: Path) -> list[str]:
        lines = [
            "cd /",
            "mount --make-rshared /",
            f"hostname {self.name}",
            "ip link set lo up",
            "mount -t tmpfs -o mode=755 tmpfs /run",
        ]
        for name in ("lib", "log"):
            upper, work = self.folder / f"var-{name}", self.folder / f"var-{name}.work"
            options = f"lowerdir=/var/{name},upperdir={upper},workdir={work}"
            lines += [f"mkdir -p {upper} {work}", f"mount -t overlay -o {options} overlay /var/{name}"]
        for setting in _KERNEL_SETTINGS:
            copy = f"/run/sysctl/{setting}"
            lines += [f"mkdir -p {Path(copy).parent}", f"cat /proc/sys/{setting} > {copy}"]
            lines += [f"mount --bind {copy} /proc/sys/{setting}"]
        volumes = self.layout.folder / "volumes"
        lines += [f"mkdir -p {volumes} {VOLUMES}", f"mount --bind {volumes} {VOLUMES}"]
        lines += ["sysctl -q -w net.ipv4.ip_forward=1", f"touch {ready}"]
        # The first process inherits orphans: the kernel takes away their remains when it ignores the signal.
        return [*lines, "exec env --ignore-signal=CHLD sleep infinity"]
