"""The launcher as the scheduler sees it, over real gRPC, Celery and processes."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launcher_yard import Yard, running_yard, secret
from trainyard.channel import connect
from trainyard.home import process_start_time
from trainyard.spec import Output
from trainyard_launcher.backends.process import sweep
from trainyard_launcher.reports import Reporter
from trainyard_protos.v1 import common_pb2, launcher_pb2, launcher_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc

FOREVER = [sys.executable, "-c", "import signal; signal.pause()"]


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def stand_still(monkeypatch: pytest.MonkeyPatch, for_s: float) -> None:
    """This process, and with it the launcher, finds that so much time has passed in which it did not run."""
    now = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + for_s)


@pytest.fixture
async def yard(tmp_path: Path):
    async with running_yard(tmp_path) as yard:
        yield yard


async def test_an_attempt_runs_and_is_reported_phase_by_phase(yard: Yard) -> None:
    attempt = yard.assign(python("print('hi')"))
    yard.send_launch(attempt)
    ended = await yard.scheduler.ended(attempt)
    assert (ended.exit.reason, ended.exit.exit_code, ended.exit.acknowledged) == ("Completed", 0, True)
    assert yard.scheduler.phases(attempt)[-1] == "ended"
    assert not sweep.find(sweep.Target(attempt))


async def test_outputs_are_published_before_the_end_of_their_attempt_can_be_seen(yard: Yard) -> None:
    outputs = {"outputs": (Output(path="made", artifact="model"),)}
    made = yard.assign(["true"], **outputs, nodes=2)
    failed = yard.assign(python("raise SystemExit(3)"), **outputs)
    cancelled, stale = (yard.assign(["true"], **outputs) for _ in range(2))
    nothing = yard.assign(["true"])
    yard.scheduler.cancelled_late.add(cancelled)
    yard.scheduler.stale_late.add(stale)
    for attempt in (made, failed, cancelled, stale, nothing):
        yard.send_launch(attempt)
        await yard.scheduler.ended(attempt)
    [(published, before)] = yard.scheduler.published.items()
    assert (published, before[-1]) == (made, "publishing")
    assert yard.scheduler.phases(made)[-2:] == ["publishing", "ended"]
    assert "publishing" not in yard.scheduler.phases(failed) + yard.scheduler.phases(nothing)


async def test_an_end_waits_until_the_outputs_can_be_published(yard: Yard) -> None:
    made = yard.assign(["true"], outputs=(Output(path="made", artifact="model"),))
    yard.store_gate.closed = True
    yard.send_launch(made)
    await yard.scheduler.until(lambda: "publishing" in yard.scheduler.phases(made))
    await yard.restart()  # another one finds the attempt and goes on with it
    assert "ended" not in yard.scheduler.phases(made)
    yard.store_gate.closed = False
    await yard.scheduler.ended(made)
    assert "ended" not in yard.scheduler.published[made]


async def test_what_only_a_cluster_uses_is_told_once(yard: Yard) -> None:
    attempt = yard.assign(python("print('hi')"), image="team/train:1", nodes=2)
    yard.send_launch(attempt)
    await yard.scheduler.ended(attempt)
    assert [note.note for note in yard.scheduler.notes("ClusterOnly")] == ["spec.image: used on a cluster, not here"]


async def test_the_pool_is_registered_with_what_the_machine_has(yard: Yard) -> None:
    await yard.scheduler.until(lambda: bool(yard.scheduler.pools))
    pool = yard.scheduler.pools[0]
    assert pool.pool == yard.settings.pool
    assert pool.machines[0].total.cpu == len(os.sched_getaffinity(0))
    assert pool.machines[0].total.gpu == 4


async def test_a_start_delivered_twice_starts_once(yard: Yard, tmp_path: Path) -> None:
    mark = tmp_path / "starts"
    attempt = yard.assign(python(f"open({str(mark)!r}, 'a').write('x')"))
    for _ in range(5):
        yard.send_launch(attempt)
    await yard.scheduler.ended(attempt)
    assert mark.read_text() == "x"


async def test_a_start_that_comes_after_the_end_starts_nothing(yard: Yard, tmp_path: Path) -> None:
    mark = tmp_path / "starts"
    attempt = yard.assign(python(f"open({str(mark)!r}, 'a').write('x')"))
    yard.send_launch(attempt)
    await yard.scheduler.ended(attempt)
    yard.send_launch(attempt)
    # The launcher still knows the attempt and asks nobody, or asks and hears that it is over: neither starts it.
    later = yard.assign(python("pass"))
    yard.send_launch(later)
    await yard.scheduler.ended(later)
    assert mark.read_text() == "x"


async def test_a_stale_claim_starts_nothing(yard: Yard) -> None:
    attempt = yard.assign(FOREVER)
    yard.scheduler.stale.add(attempt)
    yard.send_launch(attempt)
    await yard.scheduler.until(lambda: attempt in yard.scheduler.claims)
    assert not yard.node(attempt).exists()


async def test_an_attempt_that_is_to_stop_already_ends_without_a_start(yard: Yard) -> None:
    attempt = yard.assign(FOREVER)
    yard.scheduler.stopping.add(attempt)
    yard.send_launch(attempt)
    assert (await yard.scheduler.ended(attempt)).exit.reason == "Stopped"
    assert not yard.node(attempt).exists()


async def test_a_failing_worker_is_named_with_its_exit_code(yard: Yard) -> None:
    attempt = yard.assign(python("import sys; sys.exit(7)"))
    yard.send_launch(attempt)
    exit = (await yard.scheduler.ended(attempt)).exit
    assert (exit.reason, exit.exit_code, exit.first_failing_rank, exit.node) == ("WorkerFailed", 7, 0, 0)


async def test_a_failing_node_takes_its_peers_along_and_is_the_one_named(yard: Yard) -> None:
    code = "import os, signal, sys; sys.exit(3) if os.environ['RANK'] == '1' else signal.pause()"
    attempt = yard.assign(python(code), nodes=3)
    yard.send_launch(attempt)
    exit = (await yard.scheduler.ended(attempt)).exit
    assert (exit.reason, exit.exit_code, exit.node) == ("WorkerFailed", 3, 1)
    assert yard.scheduler.phases(attempt).count("ended") == 1
    assert not sweep.find(sweep.Target(attempt))


async def test_nodes_of_one_machine_share_a_rendezvous_and_no_folder(yard: Yard) -> None:
    attempt = await yard.run(FOREVER, nodes=2, workers_per_node=2)
    plans = [json.loads((yard.node(attempt, node) / "plan.json").read_text()) for node in range(2)]
    assert plans[0]["master_addr"] == plans[1]["master_addr"] == "127.0.0.1"
    assert plans[0]["master_port"] == plans[1]["master_port"]
    assert [plan.get("node", 0) for plan in plans] == [0, 1]


async def test_plans_can_be_read_by_their_owner_alone(yard: Yard) -> None:
    attempt = await yard.run(FOREVER)
    assert stat.S_IMODE((yard.node(attempt) / "plan.json").stat().st_mode) == 0o600


async def test_secrets_are_in_no_file(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PASSPHRASE", "sesame")
    attempt = await yard.run(FOREVER, secrets=(secret("KEY", "PASSPHRASE"),))
    files = [path for path in yard.node(attempt).parent.rglob("*") if path.is_file()]
    assert yard.node(attempt) / "plan.json" in files
    assert not any(b"sesame" in path.read_bytes() for path in files)


async def test_a_missing_secret_ends_the_attempt_before_it_starts(yard: Yard) -> None:
    attempt = yard.assign(FOREVER, secrets=(secret("KEY", "NOT_SET_ANYWHERE"),))
    yard.send_launch(attempt)
    exit = (await yard.scheduler.ended(attempt)).exit
    assert exit.reason == "SecretUnavailable"
    assert "NOT_SET_ANYWHERE" in exit.message


async def test_a_stop_ends_the_workers(yard: Yard) -> None:
    attempt = await yard.run(FOREVER, nodes=2)
    yard.send_stop(attempt)
    exit = (await yard.scheduler.ended(attempt)).exit
    assert (exit.reason, exit.message) == ("Stopped", "Cancelled")
    assert not sweep.find(sweep.Target(attempt))


async def test_a_stop_of_an_older_fence_stops_nothing(yard: Yard) -> None:
    attempt = await yard.run(FOREVER)
    yard.send_stop(attempt, fence=0)
    yard.send_stop(attempt)
    assert (await yard.scheduler.ended(attempt)).fence == 1


async def test_grandchildren_that_hide_and_ignore_sigterm_are_gone_at_the_end(yard: Yard, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    hidden = (
        "import os, signal; os.setsid(); signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        f"open({str(pid_file)!r}, 'w').write(str(os.getpid())); signal.pause()"
    )
    code = (
        "import os, subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {hidden!r}])\n"
        f"while not os.path.exists({str(pid_file)!r}) or not open({str(pid_file)!r}).read(): time.sleep(0.01)\n"
    )
    attempt = yard.assign(python(code))
    yard.send_launch(attempt)
    assert (await yard.scheduler.ended(attempt)).exit.reason == "Completed"
    assert process_start_time(int(pid_file.read_text())) is None


async def test_a_killed_agent_is_reported_lost_and_leaves_nobody(yard: Yard) -> None:
    attempt = await yard.run(FOREVER, workers_per_node=2)
    os.kill(json.loads((yard.node(attempt) / "started").read_text())["pid"], signal.SIGKILL)
    assert (await yard.scheduler.ended(attempt)).exit.reason == "AgentLost"
    assert not sweep.find(sweep.Target(attempt))


async def test_an_agent_that_cannot_begin_is_lost_and_its_own_words_are_told(tmp_path: Path) -> None:
    async with running_yard(tmp_path, agent=(sys.executable, "-c", "raise SystemExit('no luck today')")) as yard:
        attempt = yard.assign(FOREVER)
        yard.send_launch(attempt)
        exit = (await yard.scheduler.ended(attempt)).exit
    assert exit.reason == "AgentLost"
    assert "no luck today" in exit.last_lines


async def test_time_in_which_the_launcher_itself_stood_still_is_nobodys_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_yard(tmp_path) as yard:
        attempt = await yard.run(FOREVER)
        stand_still(monkeypatch, 2 * yard.settings.silence_s)
        yard.send_stop(attempt)
        assert (await yard.scheduler.ended(attempt)).exit.reason == "Stopped"


async def test_an_agent_that_falls_silent_is_given_up(tmp_path: Path) -> None:
    async with running_yard(tmp_path, silence_s=0.5) as yard:
        attempt = yard.assign(FOREVER, env={"AGENT_MODE": "silent"})
        yard.send_launch(attempt)
        assert (await yard.scheduler.ended(attempt)).exit.reason == "AgentSilent"
        assert not sweep.find(sweep.Target(attempt))


async def test_an_agent_that_never_connects_is_given_up(tmp_path: Path) -> None:
    async with running_yard(tmp_path, silence_s=0.2, connect_s=0.5) as yard:
        attempt = yard.assign(FOREVER, env={"AGENT_MODE": "mute"})
        yard.send_launch(attempt)
        assert (await yard.scheduler.ended(attempt)).exit.reason == "AgentSilent"


async def test_an_attempt_whose_reports_are_stale_is_killed(yard: Yard) -> None:
    attempt = yard.assign(FOREVER)
    yard.scheduler.stale_reports.add(attempt)
    yard.send_launch(attempt)
    assert (await yard.scheduler.ended(attempt)).exit.reason == "Stopped"
    assert not sweep.find(sweep.Target(attempt))


async def test_an_attempt_the_scheduler_does_not_list_is_killed(tmp_path: Path) -> None:
    async with running_yard(tmp_path, reconcile_s=0.2) as yard:
        attempt = await yard.run(FOREVER)
        del yard.scheduler.assignments[attempt]
        await yard.scheduler.ended(attempt)
        assert not sweep.find(sweep.Target(attempt))


async def test_a_stop_whose_message_was_lost_is_found_by_reconciling(tmp_path: Path) -> None:
    async with running_yard(tmp_path, reconcile_s=0.2) as yard:
        attempt = await yard.run(FOREVER)
        yard.scheduler.stopping.add(attempt)
        assert (await yard.scheduler.ended(attempt)).exit.reason == "Stopped"


async def test_a_worker_that_ignores_a_stop_is_killed_when_its_time_is_up(tmp_path: Path) -> None:
    async with running_yard(tmp_path, finalize_timeout_s=0.1, stop_slack_s=0.1) as yard:
        attempt = await yard.run(FOREVER, grace_period="300ms", env={"AGENT_MODE": "deaf"})
        yard.send_stop(attempt)
        assert (await yard.scheduler.ended(attempt)).exit.reason == "Stopped"
        assert not sweep.find(sweep.Target(attempt))


async def test_reports_wait_for_a_scheduler_that_is_away(yard: Yard) -> None:
    attempt = yard.assign(python("pass"))
    yard.scheduler.away = True
    yard.send_launch(attempt)
    await yard.scheduler.until(lambda: yard.scheduler.refused >= 2)
    yard.scheduler.away = False
    assert (await yard.scheduler.ended(attempt)).exit.reason == "Completed"


async def test_an_end_whose_exit_is_refused_for_good_is_told_without_it(yard: Yard) -> None:
    attempt = yard.assign(python("pass"))
    yard.scheduler.picky_about.add("Completed")
    yard.send_launch(attempt)
    report = await yard.scheduler.ended(attempt)
    assert (report.exit.reason, report.exit.message) == ("AgentLost", "the exit of its agent was refused")


async def test_an_exit_of_any_size_is_reported(yard: Yard) -> None:
    async def answered(*_: object) -> None:
        return None

    async with connect(f"127.0.0.1:{yard.port}", yard.token) as channel:
        stub = scheduler_pb2_grpc.AttemptServiceStub(channel)
        reporter = Reporter(stub, "launcher", answered, call_timeout_s=10, max_notes=1)
        huge = "x" * 1_000_000
        exit = common_pb2.Exit(reason=huge, message=huge, last_lines=[huge] * 30, unstored=[huge] * 30, exit_code=7)
        reporter.phase("attempt", 1, scheduler_pb2.ATTEMPT_PHASE_ENDED, exit)
        report = await yard.scheduler.ended("attempt")
        await reporter.close()
    assert report.exit.exit_code == 7
    assert report.ByteSize() < 200_000


async def test_an_attempt_token_is_renewed_before_it_expires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_yard(tmp_path) as yard:
        await yard.run(FOREVER, env={"AGENT_MODE": "chatty"})
        assert not yard.scheduler.notes("TokenRenewed")
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() + yard.settings.token_ttl_s / 2)
        await yard.scheduler.until(lambda: bool(yard.scheduler.notes("TokenRenewed")))


async def test_gpus_are_handed_out_exclusively_and_given_back(yard: Yard) -> None:
    from trainyard.spec import Resources

    needs = Resources(cpu=1, memory="512Mi", gpu=1)
    first = await yard.run(FOREVER, nodes=2, workers_per_node=1, resources=needs)
    second = await yard.run(FOREVER, workers_per_node=2, resources=needs)
    held = [json.loads((yard.node(first, i) / "plan.json").read_text())["gpus"] for i in range(2)]
    held.append(json.loads((yard.node(second) / "plan.json").read_text())["gpus"])
    assert sorted(index for share in held for index in share) == [0, 1, 2, 3]
    third = yard.assign(FOREVER, resources=needs)
    yard.send_launch(third)
    assert (await yard.scheduler.ended(third)).exit.reason == "StartFailed"
    yard.send_stop(first)
    await yard.scheduler.ended(first)
    await yard.run(FOREVER, workers_per_node=2, resources=needs)


async def test_an_agent_whose_token_has_expired_gets_the_next_one_when_it_comes_back(yard: Yard) -> None:
    attempt = await yard.run(FOREVER)
    expired, _ = yard.tokens.mint("default", yard.job_of(attempt), attempt, 1, ttl_s=-1)
    async with connect(f"127.0.0.1:{yard.port}", expired) as channel:
        call = launcher_pb2_grpc.AgentServiceStub(channel).Session()
        await call.write(launcher_pb2.AgentMessage(hello={"attempt_id": attempt, "fence": 1, "phase": "running"}))
        assert (await call.read()).HasField("welcome")
        renewed = (await call.read()).token
    assert yard.tokens.verify(renewed.token).expires_s > time.time()


@pytest.mark.parametrize("free_pages", [0, 1])
async def test_gpus_are_free_again_when_a_full_disk_lets_no_attempt_start(yard: Yard, free_pages: int) -> None:
    """Without a page, not even the attempt's record is written; with one, its plan and the mark of its end are not."""
    from trainyard.spec import Resources

    needs = Resources(cpu=1, memory="512Mi", gpu=4)
    attempts = yard.home / "attempts"
    attempts.mkdir()
    page = os.sysconf("SC_PAGESIZE")
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={16 * page}", "tmpfs", attempts], check=True)
    try:
        (attempts / "filler").write_bytes(b"x" * (16 - free_pages) * page)
        for _ in range(2):
            refused = yard.assign(FOREVER, workers_per_node=1, resources=needs)
            yard.send_launch(refused)
            end = await yard.scheduler.ended(refused)
            assert "No space left on device" in end.exit.message
        assert not [path for path in attempts.rglob("*") if path.name.startswith(".")]
        assert free_pages or [path.name for path in attempts.iterdir()] == ["filler"]
    finally:
        subprocess.run(["umount", attempts], check=True)
    await yard.run(FOREVER, workers_per_node=1, resources=needs)


async def test_what_is_forgotten_leaves_disk_and_metrics(yard: Yard) -> None:
    attempt = yard.assign(python("pass"))
    job = yard.job_of(attempt)
    yard.send_launch(attempt)
    await yard.scheduler.ended(attempt)
    folder = yard.node(attempt).parent
    await yard.scheduler.until(lambda: True)
    yard.send_forget(job, [attempt])
    await yard.removed()
    assert yard.metrics.deleted == [("default", job)]
    assert not folder.exists()


async def test_what_nothing_is_kept_of_is_forgotten_in_the_workspace_the_scheduler_names(yard: Yard) -> None:
    """As on a cluster, where nothing is left of an attempt that is over."""
    yard.send_forget("job-1", ["attempt-1"], workspace="vision")
    await yard.removed()
    assert yard.metrics.deleted == [("vision", "job-1")]


async def test_runs_that_metrics_cannot_remove_keep_no_others(yard: Yard) -> None:
    yard.metrics.broken.add("job-1")
    yard.send_forget("job-1", ["attempt-1"])
    yard.send_forget("job-2", ["attempt-2"])
    await yard.scheduler.until(
        lambda: [tombstone.job_id for tombstone in yard.scheduler.tombstones if not tombstone.pool] == ["job-1"]
    )
    assert ("default", "job-2") in yard.metrics.deleted
    yard.metrics.broken.clear()
    await yard.removed()
    assert ("default", "job-1") in yard.metrics.deleted


async def test_what_a_lost_message_was_about_is_forgotten_nevertheless(tmp_path: Path) -> None:
    async with running_yard(tmp_path, reconcile_s=0.2) as yard:
        attempt = yard.assign(python("pass"))
        job = yard.job_of(attempt)
        yard.send_launch(attempt)
        await yard.scheduler.ended(attempt)
        yard.remove(job, [attempt])
        await yard.removed()
        assert yard.metrics.deleted == [("default", job)]
        assert not yard.node(attempt).parent.exists()


async def test_what_was_forgotten_while_the_launcher_was_away_is_removed_at_its_start(yard: Yard) -> None:
    attempt = yard.assign(python("pass"))
    job = yard.job_of(attempt)
    yard.send_launch(attempt)
    await yard.scheduler.ended(attempt)
    await yard.close()
    yard.remove(job, [attempt])
    await yard.open()
    await yard.removed()
    assert not yard.node(attempt).parent.exists()


async def test_an_attempt_that_still_runs_keeps_its_folder_until_it_has_ended(yard: Yard) -> None:
    attempt = await yard.run(FOREVER)
    yard.send_forget(yard.job_of(attempt), [attempt])
    await yard.scheduler.until(lambda: bool(yard.metrics.deleted))
    assert yard.node(attempt).exists()
    yard.send_stop(attempt)
    await yard.removed()
    assert "ended" in yard.scheduler.phases(attempt)
    assert not yard.node(attempt).exists()
