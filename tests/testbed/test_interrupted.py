"""A run of tests leaves nothing on this machine, whatever interrupts it."""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest

from scripts.testbed.cluster import system
from scripts.testbed.cluster.cluster import Cluster
from scripts.testbed.cluster.layout import NUMBER, Layout
from scripts.testbed.patience import PATIENCE_S
from scripts.testbed.runs import processes
from scripts.testbed.runs.run import JOURNAL
from tests.conftest import REPOSITORY
from tests.testbed import interrupted, remains

RUNS = "tests/testbed/interrupted.py"
ENDED = "import sys; from scripts.testbed.runs.run import Run; sys.exit(Run().end() or 0)"


class Interrupted:
    """A run of `interrupted.py`; its reports, and what is left of it.

    Args:
        folder: for all of its files.
        command: what is run.
        environ: settings.
    """

    def __init__(self, folder, command, environ):
        self.folder = folder
        self.temporary = Path(tempfile.mkdtemp())
        self.temporary.chmod(0o755)  # PostgreSQL runs as another user
        os.mkfifo(folder / "reports")
        folders = {"TMPDIR": str(self.temporary), "PYTEST_DEBUG_TEMPROOT": str(folder)}
        self.environ = os.environ | folders | {interrupted.REPORT: str(folder / "reports")} | environ
        self._reports = os.open(folder / "reports", os.O_RDWR)
        self._unread = b""
        self._output = (folder / "output").open("w+")
        # A run that was started in the background would ignore some of the signals.
        self.process = subprocess.Popen(
            ["env", "--default-signal", *command],
            cwd=REPOSITORY,
            env=self.environ,
            stdout=self._output,
            stderr=self._output,
            start_new_session=True,
        )
        self.started = []
        self.journal = None

    def report(self):
        """The next report; raises AssertionError when the run ends without one."""
        ended = os.pidfd_open(self.process.pid)
        while b"\n" not in self._unread:
            readable = select.select([self._reports, ended], [], [], PATIENCE_S)[0]
            assert self._reports in readable, Path(self._output.name).read_text()
            self._unread += os.read(self._reports, 65536)
        os.close(ended)
        line, _, self._unread = self._unread.partition(b"\n")
        found = json.loads(line)
        self.started += [psutil.Process(pid) for pid in found.get("pids", [])]
        if self.journal is None:
            self.journal = Path(found["journal"])
            self.reaper = next(each for each in psutil.process_iter() if found["journal"] in command_of(each))
            self._reaper_ended = os.pidfd_open(self.reaper.pid)
        return found

    def wait(self):
        """Returns when the run has ended, and its reaper."""
        self.process.wait(PATIENCE_S)
        assert select.select([self._reaper_ended], [], [], PATIENCE_S)[0]

    def left(self):
        """All that is left of it."""
        yield from (str(process) for process in self.left_processes())
        yield from self.left_mounts()
        yield from (str(path) for path in self.folder.rglob("*") if path.is_socket())
        yield from map(str, self.temporary.iterdir())
        yield from groups_named(self.journal.stem)
        if self.journal.exists():
            yield self.journal.read_text()

    def left_mounts(self):
        return [point for point in remains.mount_points() if point.startswith((str(self.folder), str(self.temporary)))]

    def left_processes(self):
        mark = str(self.folder / "reports")
        marked = [each for each in psutil.process_iter() if environment_of(each).get(interrupted.REPORT) == mark]
        return [each for each in {*marked, *self.started} if runs(each)]

    def sweep(self):
        """Ends what a failed test left."""
        for process in self.left_processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for point in self.left_mounts():
            subprocess.run(["umount", "--lazy", point])
        self._output.close()
        os.close(self._reports)
        if self.journal is not None:
            os.close(self._reaper_ended)


def runs(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def command_of(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def environment_of(process):
    try:
        return process.environ()
    except (psutil.Error, OSError):
        return {}


def phase(cluster, namespace):
    return cluster.kubectl("get", "namespace", namespace, "--ignore-not-found", "--output=jsonpath={.status.phase}")


def groups_named(part):
    return [str(path) for path in Path("/sys/fs/cgroup").rglob("trainyard-*") if part in path.name]


@pytest.fixture
def run(tmp_path):
    with ExitStack() as ends:

        def start(test, command=(), **environ):
            pytest_alone = [sys.executable, "-m", "pytest", f"{RUNS}::{test}", "-q"]
            folder = tmp_path / test
            folder.mkdir()
            started = Interrupted(folder, command or pytest_alone, environ)
            ends.callback(started.sweep)
            return started

        yield start


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGKILL"])
def test_a_signal_leaves_nothing(run, name):
    interrupted = run("test_servers")
    interrupted.report()
    assert list(interrupted.left())
    interrupted.process.send_signal(signal.Signals[name])
    interrupted.wait()
    assert list(interrupted.left()) == []


def test_a_second_interrupt_while_the_first_one_takes_effect_leaves_nothing(run):
    interrupted = run("test_servers", INTERRUPTED_SLOW_END="1")
    interrupted.report()
    interrupted.process.send_signal(signal.SIGINT)
    assert interrupted.report()["ends"]
    interrupted.process.send_signal(signal.SIGINT)
    interrupted.wait()
    assert list(interrupted.left()) == []


def test_a_run_that_exits_in_the_middle_leaves_nothing(run):
    interrupted = run("test_servers", INTERRUPTED_EXIT="1")
    interrupted.report()
    interrupted.wait()
    assert list(interrupted.left()) == []


def test_the_end_of_make_ends_the_workers_of_its_tests(run):
    rule = f"interrupted: ; $(PYTEST) -n 2 {RUNS}::test_workers -q"
    interrupted = run("test_workers", ["make", f"VENV={sys.prefix}", f"--eval={rule}", "interrupted"])
    assert {len(interrupted.report()["pids"]), len(interrupted.report()["pids"])} == {3}
    interrupted.process.kill()
    interrupted.wait()
    assert list(interrupted.left()) == []


def test_a_kill_of_the_whole_group_and_of_the_reaper_leaves_what_the_next_run_removes(run):
    interrupted = run("test_servers")
    interrupted.report()
    interrupted.reaper.kill()
    os.killpg(interrupted.process.pid, signal.SIGKILL)
    interrupted.process.wait()
    subprocess.run([sys.executable, "-c", ENDED], cwd=REPOSITORY, check=True)
    assert list(interrupted.left()) == []


@pytest.mark.skipif(bool(system.obstacle()), reason=system.obstacle() or "a cluster can run here")
@pytest.mark.skipif(os.environ.get("TRAINYARD_CLUSTER") == "0", reason="TRAINYARD_CLUSTER=0 switches clusters off")
@pytest.mark.timeout(1200)  # on a busy machine a start takes minutes
def test_a_kill_leaves_neither_a_cluster_nor_a_yard_but_what_other_runs_use(run):
    cluster = Cluster(Layout(8))
    cluster.down()
    before = remains.packet_filter()
    try:
        interrupted = run("test_everything", **{NUMBER: "8"})
        report = interrupted.report()
        attempt = report["attempt"]
        assert groups_named(attempt) and remains.is_mounted(report["image"])
        namespaces = remains.namespaces_of_cluster(cluster)
        assert list(remains.of_cluster(cluster, namespaces))
        other = run("test_in_a_namespace", **{NUMBER: "8"})
        others = other.report()["namespace"]
        other.process.kill()
        other.wait()
        assert cluster.whole() and phase(cluster, report["namespace"]) == "Active"
        assert phase(cluster, others) in ("Terminating", "")
        interrupted.process.kill()
        interrupted.wait()
        assert list(interrupted.left()) == []
        assert list(remains.of_cluster(cluster, namespaces)) == []
        assert groups_named(attempt) == [] and not remains.is_mounted(report["image"])
        assert remains.packet_filter() == before
    finally:
        cluster.down()


def test_without_a_control_group_processes_are_found_by_their_mark_and_their_parents(tmp_path):
    mark = tmp_path / "journal"
    marked = os.environ | {JOURNAL: str(mark)}
    tree = "env -i setsid sleep 600 & echo $!; SPARED=1 sh -c 'echo $$; exec sleep 600' & wait"
    with subprocess.Popen(["sh", "-c", tree], env=marked, stdout=subprocess.PIPE, text=True) as shell:
        below, spared = (psutil.Process(int(shell.stdout.readline())) for _ in range(2))
        processes.kill(f"{JOURNAL}={mark}", "SPARED")
        assert (shell.wait(PATIENCE_S), runs(below), runs(spared)) == (-signal.SIGKILL, False, True)
        spared.kill()
