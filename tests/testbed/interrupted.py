"""Runs of tests that wait to be interrupted. `test_interrupted.py` starts them; they are not collected without it.

Each reports what it has started in a line of JSON, and then waits.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from scripts.testbed import buildah
from scripts.testbed.runs.run import JOURNAL
from tests.jobs import document, python, running
from tests.testbed.kubernetes import Namespace, pod

REPORT = "INTERRUPTED_REPORT"
"""Names the pipe."""
SLOW_END = "INTERRUPTED_SLOW_END"
EXIT = "INTERRUPTED_EXIT"

_open = []


def report(**what):
    """One line, whole, also when several processes write."""
    line = json.dumps({"journal": os.environ.get(JOURNAL, "")} | what)
    with open(os.environ[REPORT], "wb", buffering=0) as pipe:
        pipe.write(f"{line}\n".encode())


def wait():
    while True:
        signal.pause()


def started(redis_server, tmp_path):
    """Starts what a killed run leaves, and returns what that is."""
    folder = Path(tempfile.mkdtemp())
    _open.extend([listening(tmp_path), listening(folder)])
    disk(tmp_path / "disk")
    return [detached_process(), forked_process(), redis_server.process.pid]


def detached_process():
    """A process that keeps neither its parent nor its session nor its environment."""
    start = "import subprocess; print(subprocess.Popen(['env', '-i', 'sleep', '600'], stdout=2, process_group=0).pid)"
    command = [sys.executable, "-c", start]
    return int(subprocess.run(command, stdout=subprocess.PIPE, start_new_session=True, check=True).stdout)


def forked_process():
    """A process without a program of its own, which holds every file that this one has."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        wait()
    return pid


def listening(folder):
    server = socket.socket(socket.AF_UNIX)
    with contextlib.chdir(folder):  # a path to a socket has to be short
        server.bind("socket")
    return server


def disk(folder):
    folder.mkdir()
    if os.geteuid() == 0:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=True)


@pytest.fixture
def slow_end():
    yield
    if SLOW_END in os.environ:
        report(ends=True)
        wait()


def test_servers(redis_server, tmp_path, slow_end):
    report(pids=started(redis_server, tmp_path))
    if EXIT in os.environ:
        os._exit(1)  # as pytest-timeout does it
    wait()


@pytest.mark.parametrize("worker", [1, 2])
def test_workers(redis_server, tmp_path, worker):
    report(pids=started(redis_server, tmp_path))
    wait()


def test_in_a_namespace(cluster, cluster_namespace):
    report(namespace=cluster_namespace)
    wait()


def test_everything(cluster, cluster_namespace, yard, redis_server, postgres_server, s3_server, tmp_path):
    pids = started(redis_server, tmp_path)
    namespace = Namespace(cluster, cluster_namespace)
    with_memory = pod("runs", "exec sleep 3600", volumes=[{"name": "memory", "emptyDir": {"medium": "Memory"}}])
    with_memory["spec"]["containers"][0]["volumeMounts"] = [{"name": "memory", "mountPath": "/memory"}]
    namespace.apply(with_memory)
    namespace.wait("condition=Ready", "pod/runs")
    with yard.client() as client:
        job = client.submit(document(python("import time; time.sleep(600)"), nodes=2))
        running(job)
        attempt = job.status().attempts[0].id
    pids += [process.pid for process in (*yard.processes(), *postgres_server.children())]
    with buildah.container("scratch") as image:
        report(pids=[*pids, s3_server.process.pid], attempt=attempt, image=str(image), namespace=cluster_namespace)
        wait()
