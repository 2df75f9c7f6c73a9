"""The peers' own Python environments, and a Ray cluster in one.

Each is built once per content of its requirements (`peers.txt`, `trackers.txt`) under the user's cache, so that only
the first run pays for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
from _harness import clean_environment

LAUNCHERS = Path(__file__).with_name("peers.txt")
TRACKERS = Path(__file__).with_name("trackers.txt")
UV = Path(sys.executable).with_name("uv")


def environment(requirements: Path = LAUNCHERS) -> Path:
    """The `bin` folder of the environment with these packages; builds it when it is missing."""
    content = hashlib.sha256(requirements.read_bytes() + sys.version.encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "trainyard" / "bench"
    folder = cache / content
    if not (folder / ".complete").exists():
        print(f"building the peers' environment in {folder}", file=sys.stderr)
        shutil.rmtree(folder, ignore_errors=True)
        python = folder / "bin" / "python"
        install = ["pip", "install", "--quiet", "--compile-bytecode", "--python", str(python), "-r", str(requirements)]
        for arguments in (["venv", "--quiet", "--python", sys.executable, str(folder)], install):
            subprocess.run([UV, *arguments], check=True)
        (folder / ".complete").touch()
    return folder / "bin"


@contextlib.contextmanager
def ray_cluster(bin_folder: Path) -> Iterator[str]:
    """A Ray head on free ports of this machine. Yields the address of its job server."""
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        log = Path(folder) / "start.log"
        address, command = _head_command(bin_folder, folder)
        with log.open("wb") as output:
            head = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=ray_environment(), start_new_session=True
            )
        try:
            _wait_for_jobs(bin_folder, address, head, log)
            yield address
        finally:
            end_tree(head)  # `ray stop` would end every Ray of the machine


def ray_environment() -> dict[str, str]:
    """Ray's surroundings: no usage reports."""
    return clean_environment(RAY_USAGE_STATS_ENABLED="0", RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0")


def _head_command(bin_folder: Path, folder: str) -> tuple[str, list[str]]:
    names = ("port", "dashboard-port", "dashboard-agent-listen-port", "dashboard-agent-grpc-port")
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    options = [f"--{name}={port}" for name, port in ports.items()]
    start = [str(bin_folder / "ray"), "start", "--head", "--block", "--include-dashboard=true", "--num-cpus=2"]
    local = ["--node-ip-address=127.0.0.1", f"--temp-dir={folder}"]
    return f"http://127.0.0.1:{ports['dashboard-port']}", [*start, *local, *options]


def _wait_for_jobs(bin_folder: Path, address: str, head: subprocess.Popen[bytes], log: Path) -> None:
    """Ray says that it is up before its job server is: the first accepted job is the only proof.

    Raises:
        RuntimeError: it ended, or took more than two minutes.
    """
    probe = [str(bin_folder / "ray"), "job", "submit", "--address", address, "--", "true"]
    for _ in range(40):
        if head.poll() is not None:
            break
        if subprocess.run(probe, env=ray_environment(), capture_output=True, timeout=120).returncode == 0:
            return
    raise RuntimeError(f"Ray did not start:\n{log.read_text()}")


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


def end_tree(head: subprocess.Popen[bytes]) -> None:
    """Ends a process that was started here, and its children, and nothing else."""
    try:
        tree = [*psutil.Process(head.pid).children(recursive=True), psutil.Process(head.pid)]
    except psutil.NoSuchProcess:
        return
    for process in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(tree, timeout=10)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    head.wait()
