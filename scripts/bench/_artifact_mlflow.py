"""An mlflow server with artifacts on this machine's disk, and its client in processes of their own."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from _harness import clean_environment
from _peers import end_tree, free_ports

START_S = 300.0
WORKERS = 2  # as many as cores
SCRIPT = Path(__file__).with_name("_artifact_peer.py")


@dataclass(frozen=True, slots=True)
class Mlflow:
    """A server that is up."""

    python: Path
    uri: str

    def put(self, folder: Path) -> tuple[float, str]:
        """Stores a folder; seconds, and the run it is in."""
        answer = self._client("put", str(folder))
        return float(answer["seconds"]), str(answer["run"])

    def get(self, run: str, folder: Path) -> float:
        """Fetches what a run holds; seconds."""
        folder.mkdir()
        return float(self._client("get", run, str(folder))["seconds"])

    def _client(self, *arguments: str) -> dict[str, str]:
        command = [self.python, SCRIPT, self.uri, *arguments]
        done = subprocess.run(
            command, env=_environment(), check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        answer: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
        return answer


@contextlib.contextmanager
def mlflow_server(bin_folder: Path, folder: Path) -> Iterator[Mlflow]:
    """A server with its database and artifacts below `folder`; it ends with the block."""
    folder.mkdir()
    (port,) = free_ports(1)
    uri = f"http://127.0.0.1:{port}"
    command = [
        *(bin_folder / "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)),
        *(
            "--workers",
            str(WORKERS),
            "--backend-store-uri",
            f"sqlite:///{folder}/mlflow.db",
            "--artifacts-destination",
            str(folder / "artifacts"),
        ),
    ]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(command, cwd=folder, env=_environment(bin_folder), stdout=log, stderr=log)
    try:
        _wait(server, f"{uri}/health", folder / "log")
        yield Mlflow(bin_folder / "python", uri)
    finally:
        end_tree(server)


def _environment(bin_folder: Path | None = None) -> dict[str, str]:
    settings = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true", "GIT_PYTHON_REFRESH": "quiet"}
    environment = clean_environment(**settings)
    if bin_folder is not None:  # the server starts its workers by name
        environment["PATH"] = f"{bin_folder}:{environment['PATH']}"
    return environment


def _wait(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while server.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(0.5)  # nothing tells when it is up
    raise RuntimeError(f"mlflow's server did not start:\n{log.read_text()}")
