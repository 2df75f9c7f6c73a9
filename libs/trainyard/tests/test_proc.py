"""A signal reaches the process that was meant, or none."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from trainyard.agent import processes
from trainyard.home import process_start_time
from trainyard.proc import Process, open_process, process_of, send_signal


@contextmanager
def sleeping() -> Iterator[tuple[subprocess.Popen[bytes], Process]]:
    with subprocess.Popen(["sleep", "1000"]) as child:
        try:
            found = process_of(child.pid)
            assert found is not None
            yield child, found
        finally:
            child.kill()


def test_a_process_that_got_the_pid_later_gets_no_signal():
    with sleeping() as (child, found):
        assert not send_signal(child.pid, found.start_time - 1, signal.SIGKILL)
        assert open_process(child.pid, found.start_time - 1) is None
        assert process_start_time(child.pid) == found.start_time
        assert send_signal(child.pid, found.start_time, signal.SIGTERM)
        assert child.wait() == -signal.SIGTERM


def test_a_process_that_has_ended_gets_none():
    with sleeping() as (child, found):
        child.kill()
        child.wait()
        assert not send_signal(child.pid, found.start_time, signal.SIGTERM)
        assert open_process(child.pid, found.start_time) is None


def test_what_a_process_looks_like():
    found = process_of(os.getpid())
    assert found is not None and not found.ended
    assert (found.parent, found.group, found.session) == (os.getppid(), os.getpgid(0), os.getsid(0))
    assert found.start_time == process_start_time(os.getpid())


ORPHAN = "import subprocess; print(subprocess.Popen(['sleep', '1000'], start_new_session=True, stdout=2).pid)"


@pytest.fixture
def stranger() -> Iterator[Process]:
    """A process that leads a group and is not below this one."""
    printed = subprocess.run([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, check=True).stdout
    found = process_of(int(printed))
    assert found is not None
    yield found
    send_signal(found.pid, found.start_time, signal.SIGKILL)


def test_a_group_s_number_that_somebody_else_got_is_left_alone(stranger):
    processes.signal_group(stranger.pid, signal.SIGKILL)
    assert process_start_time(stranger.pid) == stranger.start_time


def test_a_group_is_told_with_everything_in_it(tmp_path: Path):
    script = "sleep 1000 & echo $! > member; echo ready; wait"
    with subprocess.Popen(["sh", "-c", script], cwd=tmp_path, process_group=0, stdout=subprocess.PIPE) as leader:
        assert leader.stdout is not None and leader.stdout.readline() == b"ready\n"
        member = os.pidfd_open(int((tmp_path / "member").read_text()))
        processes.signal_group(leader.pid, signal.SIGTERM)
        assert leader.wait() == -signal.SIGTERM
    with os.fdopen(member), pytest.raises(ProcessLookupError):
        while True:
            signal.pidfd_send_signal(member, 0)
