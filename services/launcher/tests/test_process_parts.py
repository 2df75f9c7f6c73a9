"""The parts of the process backend by themselves."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from launcher_yard import running_yard
from trainyard import copies
from trainyard.home import boot_id, process_start_time
from trainyard.proc import Process, process_of
from trainyard.spec import Metadata, Secret, SecretKeyReference, SecretSource, Spec, TrainingJob
from trainyard_launcher.backend import Facts, Launch, NodeEnd
from trainyard_launcher.backends.process import ProcessBackend, cgroups, gpus, sweep
from trainyard_launcher.backends.process.agents import environment
from trainyard_launcher.backends.process.folders import AttemptFolder, AttemptRecord, NodeFolder, NodeRecord
from trainyard_launcher.registration import launcher_id
from trainyard_launcher.secrets import SecretUnavailable, resolve
from trainyard_protos.v1 import common_pb2, launcher_pb2

from scripts.testbed.patience import PATIENCE_S

FACTS = Facts("default", "job", "name", "attempt", 3, 2, 2, 30.5)


def test_a_record_survives_its_way_to_disk(tmp_path: Path) -> None:
    folder = AttemptFolder(tmp_path / "attempt")
    record = AttemptRecord(FACTS, (NodeRecord((0, 1), ("/a", "/b")), NodeRecord()), 4242, 17)
    folder.write(record)
    assert folder.read() == record


def test_a_folder_without_a_record_or_with_half_of_one_holds_no_attempt(tmp_path: Path) -> None:
    folder = AttemptFolder(tmp_path)
    assert folder.read() is None
    (tmp_path / "attempt.json").write_text('{"facts": {')
    assert folder.read() is None


def test_a_node_is_taken_once(tmp_path: Path) -> None:
    node = NodeFolder(tmp_path)
    assert node.started() is None
    assert node.take()
    assert not node.take()
    started = node.started()
    assert started is not None
    assert not started.alive


def test_a_torn_exit_record_counts_as_none(tmp_path: Path) -> None:
    node = NodeFolder(tmp_path)
    assert node.exit() is None
    (tmp_path / "exit.bin").write_bytes(common_pb2.Exit(reason="Completed", message="x" * 50).SerializeToString()[:20])
    assert node.exit() is None


def test_where_a_killed_agent_logged_nothing_the_last_lines_are_those_of_its_worker(tmp_path: Path) -> None:
    node = NodeFolder(tmp_path)
    assert node.log_tail(2) == []
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "rank-0.log").write_text("one\ntwo\nthree\n")
    (tmp_path / "agent.log").touch()
    assert node.log_tail(2) == ["two", "three"]
    (tmp_path / "agent.log").write_text("no plan\n")
    assert node.log_tail(2) == ["no plan"]


def test_both_forms_of_a_plan_say_the_same(tmp_path: Path) -> None:
    from google.protobuf import json_format

    plan = launcher_pb2.NodePlan(attempt_id="a", node=1, grace_s=2.5, tied_to_start_time=2**40, env={"A": "b"})
    NodeFolder(tmp_path).write_plan(plan)
    again = json_format.ParseDict(json.loads((tmp_path / "plan.json").read_text()), launcher_pb2.NodePlan())
    assert NodeFolder(tmp_path).plan() == again == plan


def test_agents_inherit_nothing_of_an_attempt_the_yard_itself_runs_in(tmp_path: Path) -> None:
    base = {"PATH": "/bin", "TRAINYARD_RANK": "7", "TORCHELASTIC_RUN_ID": "outer"}
    assert environment(tmp_path, "inner", 1, ["TRAINYARD_*"], base) == {
        "PATH": "/bin",
        "TRAINYARD_HOME": str(tmp_path),
        "TRAINYARD_ATTEMPT_ID": "inner",
        "TRAINYARD_NODE": "1",
        "MALLOC_ARENA_MAX": "2",
    }


def test_gpus_are_taken_all_or_none() -> None:
    devices = gpus.Gpus(range(3))
    assert devices.take("a", [1, 1]) == [(0,), (1,)]
    with pytest.raises(gpus.NotEnoughGpus, match="2 GPUs are needed and 1 of 3 are free"):
        devices.take("b", [1, 1])
    assert devices.take("c", [1]) == [(2,)]
    devices.release("a")
    assert devices.take("d", [2]) == [(0, 1)]


@pytest.mark.parametrize(
    ("wanted", "indices"),
    [(None, [0, 1, 2]), ("", []), ("2,0", [2, 0]), ("GPU-b", [1]), ("1,9,0", [1]), ("GPU-", []), ("-1", [])],
)
def test_visible_devices_are_read_as_cuda_does(wanted: str | None, indices: list[int]) -> None:
    assert gpus.visible(["GPU-a", "GPU-b", "GPU-c"], wanted) == indices


def test_the_launchers_id_is_kept(tmp_path: Path) -> None:
    assert launcher_id(tmp_path) == launcher_id(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["launcher-id"]


def test_the_launchers_id_is_on_disk_before_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    sync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino) or sync(descriptor))
    launcher_id(tmp_path)
    assert synced == [(tmp_path / "launcher-id").stat().st_ino, tmp_path.stat().st_ino]


@pytest.mark.parametrize("content", [b"", b"\n", bytes(37)], ids=["empty", "blank", "zeros"])
def test_a_damaged_id_is_refused_and_kept(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "launcher-id").write_bytes(content)
    with pytest.raises(RuntimeError, match=r"launcher-id is damaged.*remove the file"):
        launcher_id(tmp_path)
    assert (tmp_path / "launcher-id").read_bytes() == content


def job_with(**source: str | SecretKeyReference) -> TrainingJob:
    spec = Spec(command=("true",), secrets=(Secret(name="KEY", from_=SecretSource(**source)),))
    return TrainingJob(metadata=Metadata(name="test"), spec=spec)


def test_a_secret_from_a_file_loses_its_last_line_end(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("sesame\n")
    assert resolve(job_with(file=str(tmp_path / "key"))) == {"KEY": "sesame"}


def test_a_secret_whose_file_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(SecretUnavailable, match=r"secret KEY: cannot read .*/nowhere: No such file"):
        resolve(job_with(file=str(tmp_path / "nowhere")))


def test_a_secret_of_a_cluster_is_refused_on_one_machine() -> None:
    with pytest.raises(SecretUnavailable, match=r"secret KEY: a Secret of a Kubernetes cluster"):
        resolve(job_with(secret=SecretKeyReference(name="hub", key="token")))


@pytest.mark.parametrize("source", [{"file": "attempt.key"}, {"env": "TRAINYARD_SERVICE_BROKER_URL"}])
def test_on_a_cluster_no_job_gets_what_is_the_launchers_own(source: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "attempt.key").write_text("sesame")
    own = {"file": str(tmp_path / "attempt.key")} if "file" in source else source
    with pytest.raises(SecretUnavailable, match=r"secret KEY: .* is the launcher's own.*from\.secret"):
        resolve(job_with(**own), {"TRAINYARD_SERVICE_BROKER_URL": "sesame"}, cluster=True)


def test_on_a_cluster_a_variable_that_was_meant_for_jobs_is_read() -> None:
    assert resolve(job_with(env="WANDB_API_KEY"), {"WANDB_API_KEY": "sesame"}, cluster=True) == {"KEY": "sesame"}


def test_sweeping_finds_descendants_that_cleaned_their_environment() -> None:
    code = "import subprocess; print(subprocess.Popen(['env', '-i', '/bin/sleep', '1000']).pid, flush=True); input()"
    environ = os.environ | {"TRAINYARD_ATTEMPT_ID": "swept", "TRAINYARD_NODE": "0"}
    with subprocess.Popen([sys.executable, "-c", code], env=environ, stdin=-1, stdout=-1) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert sweep.find(sweep.Target("swept")).keys() == {parent.pid, child}
        assert sweep.find(sweep.Target("swept", node=1)) == {}
        assert sweep.end_all(sweep.Target("swept", node=0), 10) == 2
        assert sweep.find(sweep.Target("swept")) == {}


def session_of_one(folder: Path) -> tuple[sweep.Leader, int]:
    """A session whose leader has ended, and a process in it, in a folder, without anything in its environment."""
    code = "import os; print(open(f'/proc/{os.getpid()}/stat').read(), flush=True); input()"
    script = f'env -i sleep 1000 > /dev/null & echo $!; exec {sys.executable} -c "{code}"'
    with subprocess.Popen(["sh", "-c", script], cwd=folder, start_new_session=True, stdin=-1, stdout=-1) as leader:
        assert leader.stdout is not None
        member = int(leader.stdout.readline())
        started = process_of(leader.pid)
        assert started is not None and leader.stdout.readline()
        leader.communicate(b"\n")
    return sweep.Leader(started.pid, started.start_time), member


def test_of_a_session_without_its_leader_only_what_uses_the_node_s_folder_is_ended(tmp_path: Path) -> None:
    agent, member = session_of_one(tmp_path)
    assert sweep.find(sweep.Target("gone", 0, agent, tmp_path / "elsewhere")) == {}
    target = sweep.Target("gone", 0, agent, tmp_path)
    assert sweep.find(target).keys() == {member}
    assert sweep.end_all(target, PATIENCE_S) == 1


@contextmanager
def stranger_in(folder: Path) -> Iterator[Process]:
    """A process in a session of its own, in a folder."""
    with subprocess.Popen(["sleep", "1000"], cwd=folder, start_new_session=True) as stranger:
        try:
            started = process_of(stranger.pid)
            assert started is not None
            yield started
        finally:
            stranger.kill()


def test_a_session_s_pid_that_was_reused_names_nothing_of_an_attempt(tmp_path: Path) -> None:
    with stranger_in(tmp_path) as started:
        earlier = sweep.Leader(started.pid, started.start_time - 1)
        assert sweep.find(sweep.Target("gone", 0, earlier, tmp_path)) == {}
        own = sweep.Leader(started.pid, started.start_time)
        assert sweep.find(sweep.Target("gone", 0, own, tmp_path)).keys() == {started.pid}


class Heard:
    """An observer that waits for one end."""

    def __init__(self) -> None:
        self.end: asyncio.Future[NodeEnd] = asyncio.get_running_loop().create_future()

    def ended(self, end: NodeEnd) -> None:
        self.end.set_result(end)

    def remark(self, attempt_id: str, reason: str, message: str) -> None:
        raise AssertionError(message)


async def test_a_process_that_got_a_dead_agent_s_pid_is_left_alone(tmp_path: Path) -> None:
    folder = AttemptFolder(tmp_path / "attempts" / FACTS.attempt_id)
    folder.write(AttemptRecord(replace(FACTS, nodes=1), (NodeRecord(),), 4242, 17))
    folder.node(0).path.mkdir()
    with stranger_in(tmp_path) as started:
        record = {"pid": started.pid, "start_time": started.start_time - 1, "boot_id": boot_id()}
        (folder.node(0).path / "started").write_text(json.dumps(record))
        backend, observer = ProcessBackend(tmp_path), Heard()
        try:
            await backend.open(observer)
            assert (await asyncio.wait_for(observer.end, PATIENCE_S)).exit is None
        finally:
            await backend.close()
        assert process_start_time(started.pid) == started.start_time


@pytest.mark.parametrize("killed", [False, True])
async def test_copies_of_what_the_store_has_go_when_the_attempt_is_over(tmp_path: Path, killed: bool) -> None:
    """Also when the launcher was killed after it had marked the attempt as over."""
    folder = AttemptFolder(tmp_path / "attempts" / FACTS.attempt_id)
    folder.write(AttemptRecord(FACTS, (NodeRecord(), NodeRecord()), 4242, 17))
    for node in (folder.node(0).path, folder.node(1).path):
        (node / "work").mkdir(parents=True)
        for name in ("step-1.pt", "notes.txt"):
            (node / "work" / name).write_text(name)
        entry = node / "work/step-1.pt"
        copies.record_checkpoint(node, entry, copies.signature(entry), copies.complete_ns(entry))
    if killed:
        folder.mark_over()
    backend = ProcessBackend(tmp_path)
    try:
        await (backend.open(Heard()) if killed else backend.settle(FACTS.attempt_id))
        async with asyncio.timeout(PATIENCE_S):
            while folder.has_copies():  # the removal runs in the background, and nothing waits for it
                await asyncio.sleep(0.01)
    finally:
        await backend.close()
    assert [path.name for path in folder.path.glob("node-*/work/*")] == ["notes.txt", "notes.txt"]


UNIFIED = "cgroup2 {root} cgroup2 rw 0 0\n"


def test_version_two_groups_go_beside_a_group_that_has_processes_of_its_own(tmp_path: Path) -> None:
    # A group with processes cannot hand controllers down, which its own file says by being read-only here.
    own = tmp_path / "fs" / "user" / "session"
    own.mkdir(parents=True)
    (own / "cgroup.subtree_control").write_text("")
    (own / "cgroup.controllers").write_text("")
    (own.parent / "cgroup.subtree_control").write_text("cpu memory pids")
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / "mounts").write_text(UNIFIED.format(root=tmp_path / "fs"))
    (proc / "cgroup").write_text("0::/user/session\n")
    found = cgroups.detect(proc)
    assert (found.version, set(found.parents.values())) == (2, {own.parent})


def test_a_machine_without_cgroups_says_why_limits_are_not_enforced(tmp_path: Path) -> None:
    (tmp_path / "mounts").write_text("proc /proc proc rw 0 0\n")
    (tmp_path / "cgroup").write_text("0::/\n")
    found = cgroups.detect(tmp_path)
    assert found.parents == {}
    assert found.why_not == "no cgroup can be made for cpu and memory"


here = cgroups.detect()


@pytest.mark.parametrize(("cpu", "workers", "threads"), [(0.5, 1, 1), (1.999, 1, 1), (3, 1, 3), (3, 2, 0)])
def test_a_worker_that_is_alone_has_threads_for_the_cores_it_asked_for(cpu: float, workers: int, threads: int) -> None:
    facts = replace(FACTS, workers_per_node=workers)
    assert Launch(facts, [], common_pb2.Resources(cpu=cpu)).threads == threads


@pytest.mark.parametrize("enforced", [True, False])
async def test_plans_speak_of_threads_where_cores_are_limited(tmp_path: Path, enforced: bool) -> None:
    from trainyard.spec import Resources

    async with running_yard(tmp_path, enforce_limits=enforced, capacity_cpu=8) as yard:
        attempt = yard.assign(["true"], resources=Resources(cpu=3, memory="32Mi"))
        yard.send_launch(attempt)
        await yard.scheduler.ended(attempt)
        plan = NodeFolder(yard.node(attempt)).plan()
    assert plan.threads == (3 if enforced and here.limits_cpu else 0)


@pytest.mark.skipif("memory" not in here.parents, reason="no memory cgroup can be made here")
async def test_a_worker_that_uses_more_memory_than_its_limit_ends_as_out_of_memory(tmp_path: Path) -> None:
    from trainyard.spec import Resources

    async with running_yard(tmp_path, agent_memory=64 * 2**20) as yard:
        greedy = [sys.executable, "-c", "x = bytearray(b'x' * 2**29); print(len(x))"]
        attempt = yard.assign(greedy, resources=Resources(cpu=1, memory="32Mi"))
        yard.send_launch(attempt)
        exit = (await yard.scheduler.ended(attempt)).exit
    assert (exit.reason, exit.first_failing_rank, exit.signal) == ("OutOfMemory", 0, "SIGKILL")
    assert (exit.memory.limit_bytes, exit.memory.oom_kills, exit.memory.enforced) == (96 * 2**20, 1, True)
    assert exit.memory.peak_bytes > 64 * 2**20
    for parent in here.parents.values():
        assert not list(parent.glob(f"trainyard-{attempt}*"))


@pytest.mark.skipif("cpu" not in here.parents, reason="no cpu cgroup can be made here")
def test_groups_carry_the_limits_and_are_removed() -> None:
    folders = here.create(f"trainyard-test-{os.getpid()}", cpu=1.5, memory_bytes=2**30)
    try:
        for folder in map(Path, folders):
            if (folder / "cpu.cfs_quota_us").exists():
                assert (folder / "cpu.cfs_quota_us").read_text().strip() == "150000"
            if (folder / "memory.limit_in_bytes").exists():
                assert (folder / "memory.limit_in_bytes").read_text().strip() == str(2**30)
    finally:
        cgroups.remove(folders)
    assert not any(Path(folder).exists() for folder in folders)
