"""A real MLflow server for tests."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.testbed.patience import PATIENCE_S
from scripts.testbed.ports import free_port


def wait_for(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, "this never came true"
        time.sleep(0.02)
    return found


class Server:
    """A real MLflow server on loopback, which can go away and come back."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        store = f"sqlite:///{self.folder / 'mlflow.db'}"
        command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", store, "--workers", "1"]
        command += ["--artifacts-destination", str(self.folder / "artifacts"), "--host", "127.0.0.1"]
        with open(self.folder / "server.log", "ab") as output:
            self._process = subprocess.Popen(
                [*command, "--port", str(self.port)],
                stdout=output,
                stderr=output,
                cwd=self.folder,
                start_new_session=True,
                env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "GIT_PYTHON_REFRESH": "quiet"},
            )
        wait_for(self._answers)

    def _answers(self) -> bool:
        assert self._process is not None and self._process.poll() is None, (self.folder / "server.log").read_text()
        try:
            urllib.request.urlopen(f"{self.uri}/health", timeout=5).close()
        except OSError:
            return False
        return True

    def stop(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, 9)
            self._process.wait()
            self._process = None
