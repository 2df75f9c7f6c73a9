"""What workers produce arrives: numbers, lines, checkpoints, outputs; and what they need is there before they start."""

import asyncio
import json
import subprocess
import uuid

import pytest
from blake3 import blake3
from trainyard.agent import courtesy
from trainyard.artifacts import download, upload
from trainyard_protos.v1 import artifacts_pb2, metrics_pb2
from trainyard_protos.v1.launcher_pb2 import AgentCommand as Command

TRAIN = """
import os, pathlib, signal, sys
from trainyard import tracker
resume = os.environ.get("TRAINYARD_RESUME_FROM")
start = int(pathlib.Path(resume).read_text()) + 1 if resume else 0
print("starting at", start, flush=True)
folder = pathlib.Path(os.environ["TRAINYARD_CHECKPOINT_DIR"])
for step in range(start, 10):
    tracker.log({"loss": 1.0 / (step + 1)}, step=step)
    if step % 3 == 2:
        draft = folder / "draft"
        draft.write_text(str(step))
        draft.rename(folder / f"step-{step}.txt")
    if step == int(os.environ.get("DIE_AT", -1)):
        os.kill(os.getpid(), signal.SIGKILL)
"""
TELL_MEMORY = """
import atexit, sys
def tell():
    peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
    open("{path}", "w").write(peak)
if "trainyard.agent" in sys.orig_argv:
    atexit.register(tell)
"""
CHECKPOINTS = {"path": "checkpoints", "pattern": "step-{step}.txt", "settle_s": 0.2, "keep_last": 2}


async def versions(yard, kind):
    async with yard.artifacts_stub() as stub:
        answer = await stub.ListVersions(artifacts_pb2.ListVersionsRequest(workspace="default", kind=kind))
    return list(answer.versions)


async def store(yard, folder, name, kind="code"):
    async with yard.artifacts_stub() as stub:
        return await upload(stub, folder, workspace="default", name=name, kind=kind)


def folder_with(path, **files):
    path.mkdir(parents=True)
    for name, content in files.items():
        (path / name.replace("__", ".")).write_text(content)
    return path


async def test_a_whole_checkpoint_is_stored_by_node_0_alone(attempt, yard):
    """The others' copies would be versions of the same step whose cut knows nothing of what node 0's workers log."""
    for node in (1, 0):
        run = attempt(["python-code", TRAIN], checkpoints=CHECKPOINTS, nodes=2, node=node)
        await run.run()
        assert [version.checkpoint.step for version in await versions(yard, "checkpoint")] == ([] if node else [8, 5])


async def steps_of(rank, run):
    """Those of a rank's stitched series, as often as they are there."""
    async with run.yard.metrics_stub() as stub:
        selector = metrics_pb2.SeriesSelector(workspace="default", job_id=run.job_id, names=["loss"])
        answer = await stub.QuerySeries(metrics_pb2.QuerySeriesRequest(selector=selector))
    return [step for series in answer.series if series.rank == rank for step in series.step]


async def test_after_a_whole_checkpoint_the_series_of_every_node_have_no_gap_and_no_doubled_step(attempt, yard):
    first = attempt(["python-code", TRAIN], checkpoints=CHECKPOINTS, env={"DIE_AT": "7"}, nodes=2, node=1)
    ids = {"job_id": first.job_id, "attempt_id": first.id}
    await first.run()
    await attempt(["python-code", TRAIN], checkpoints=CHECKPOINTS, env={"DIE_AT": "7"}, nodes=2, **ids).run()
    again = {"job_id": first.job_id, "attempt_id": str(uuid.uuid4()), "fence": 2}
    for node in (1, 0):
        resumed = attempt(["python-code", TRAIN], checkpoints=CHECKPOINTS, nodes=2, node=node, **again)
        await resumed.run()
        assert resumed.output(rank=node) == "starting at 6\n"
        assert await steps_of(node, resumed) == list(range(10))


async def test_of_a_sharded_checkpoint_every_node_names_its_own_writers(attempt, yard):
    code = (
        "import os, pathlib; from trainyard import tracker\n"
        "tracker.log({'loss': 1}, step=1)\n"
        "draft = pathlib.Path('draft'); draft.mkdir()\n"
        "(draft / f'zero_pp_rank_{os.environ[\"TRAINYARD_RANK\"]}_states.pt').write_text('a part')\n"
        "draft.rename('checkpoints/step-1.txt')"
    )
    first = attempt(["python-code", code], checkpoints=CHECKPOINTS, nodes=2, node=1)
    await first.run()
    ids = {"job_id": first.job_id, "attempt_id": first.id}
    await attempt(["python-code", code], checkpoints=CHECKPOINTS, nodes=2, **ids).run()
    [version] = await versions(yard, "checkpoint")
    assert list(version.checkpoint.cut.values()) == [1, 1]
    assert not version.checkpoint.HasField("elsewhere")


@pytest.mark.parametrize(("nodes", "ranks"), [(1, None), (2, [0])])
async def test_a_checkpoint_tells_where_other_nodes_end_if_there_are_some(attempt, yard, nodes, ranks):
    await attempt(["python-code", TRAIN], checkpoints=CHECKPOINTS, nodes=nodes).run()
    checkpoint = (await versions(yard, "checkpoint"))[0].checkpoint
    assert checkpoint.HasField("elsewhere") == (nodes > 1)
    if checkpoint.HasField("elsewhere"):
        assert (checkpoint.elsewhere.step, list(checkpoint.elsewhere.ranks)) == (8, ranks)


async def test_tracked_values_arrive_each_once(attempt):
    code = "from trainyard import tracker\nfor s in range(25000): tracker.log({'loss': s, 'acc': -s}, step=s)"
    run = attempt(["python-code", code])
    assert (await run.run()).acknowledged
    assert await run.series("loss") == {step: float(step) for step in range(25000)}
    assert await run.series("acc") == {step: float(-step) for step in range(25000)}


async def test_progress_and_newest_values_are_heard_while_training_runs(attempt, yard):
    code = (
        "import time; from trainyard import tracker\n"
        "tracker.progress(4, 10); tracker.log({'loss': 0.25}, step=4)\nprint('logged', flush=True)\ntime.sleep(3600)"
    )
    run = attempt(["python-code", code])
    await run.start()
    beat = await yard.launcher.wait_for(lambda each: each.heartbeat.progress.step == 4)
    assert beat.heartbeat.progress.total_steps == 10
    await yard.launcher.wait_for(lambda each: each.heartbeat.progress.metrics.get("loss") == 0.25)
    run.process.terminate()
    await run.wait()
    assert run.exit().progressed


async def test_what_a_worker_uses_is_measured_and_stored(attempt, yard):
    run = attempt(["sh", "-c", "echo ready; sleep 3600"])
    await run.start()
    beat = await yard.launcher.wait_for(lambda each: any(w.usage.memory_bytes for w in each.heartbeat.workers))
    assert beat.heartbeat.workers[0].usage.memory_bytes < 100e6
    run.process.terminate()
    await run.wait()
    assert list(await run.series("system/memory_bytes"))


async def test_params_and_notes_of_a_script_become_those_of_its_run(attempt, yard):
    """Apart from what its job asked for, of whose variables the names are kept."""
    code = "from trainyard import tracker; tracker.params({'lr': 0.5, 'spec': 'mine'}); tracker.note('a note')\n"
    code += "tracker.tags({'team': 'x'})"
    document = {
        "metadata": {"name": "a", "labels": {"owner": "b"}},
        "spec": {"nodes": 1, "env": {"B": "hidden", "A": ""}},
    }
    run = attempt(["python-code", code], spec_json=json.dumps(document))
    await run.run()
    async with yard.metrics_stub() as stub:
        [stored] = (await stub.ListRuns(metrics_pb2.ListRunsRequest(workspace="default", job_id=run.job_id))).runs
    assert json.loads(stored.params) == {"lr": 0.5, "spec": "mine"}
    assert json.loads(stored.spec) == {"nodes": 1, "env": ["A", "B"], "labels": {"owner": "b"}}
    assert b"hidden" not in stored.SerializeToString()
    assert (stored.notes, dict(stored.tags)) == ("a note", {"team": "x"})


async def test_a_yard_that_goes_away_and_comes_back_gets_everything_once(attempt, yard):
    code = (
        "import pathlib, time; from trainyard import tracker\n"
        "for s in range(200):\n    tracker.log({'loss': s}, step=s); print('line', s, flush=True)\n"
        "    if s == 50:\n        print('waiting', flush=True)\n        open('go').read()"
    )
    run = attempt(["python-code", code])
    subprocess.run(["mkdir", run.folder / "work"], check=True)
    subprocess.run(["mkfifo", run.folder / "work" / "go"], check=True)
    await run.start()
    await yard.launcher.wait_for_line("waiting")
    await yard.stop()
    await asyncio.to_thread((run.folder / "work" / "go").write_text, "\n")
    await asyncio.to_thread(wait_for_text, run.folder / "out" / "rank-0.log", "line 199")
    await yard.start()
    assert await run.wait() == 0
    assert run.exit().acknowledged
    assert await run.series("loss") == {step: float(step) for step in range(200)}
    texts = [line.text for line in await run.stored_lines() if line.text != "waiting"]
    assert texts == [f"line {step}" for step in range(200)]


async def test_a_peers_failure_does_not_keep_a_node_that_has_failed_itself_from_storing_its_records(attempt, yard):
    run = attempt(["sh", "-c", "echo the reason; exit 3"], grace_s=0.01)
    yard.door.open.clear()
    await run.start()
    await yard.launcher.wait_for(lambda each: each.phase.phase == "finishing")
    yard.launcher.tell(Command(stop=Command.Stop(reason="PeerFailed", grace_s=0.01)))
    await yard.launcher.wait_for_heartbeats(60)  # longer than who has to stop may take to store records
    yard.door.open.set()
    await run.wait()
    assert (run.exit().reason, run.exit().acknowledged) == ("WorkerFailed", True)
    assert [line.text for line in await run.stored_lines()] == ["the reason"]


async def test_without_a_yard_a_job_trains_to_its_end_and_says_what_is_not_stored(attempt, yard):
    run = attempt(["sh", "-c", "echo hello"], finalize_timeout_s=1.0)
    await yard.stop()
    exit = await run.run()
    assert run.output() == "hello\n"
    assert (exit.reason, exit.acknowledged) == ("OutputsNotStored", False)
    assert list(exit.unstored) == ["logs and points: not everything was acknowledged in time"]
    await yard.start()


async def test_code_is_unpacked_where_the_workers_run(attempt, yard, tmp_path):
    await store(yard, folder_with(tmp_path / "code", train__sh="echo from the code"), "code")
    run = attempt(["sh", "train.sh"], code_artifact="code@latest")
    assert (await run.run()).reason == "Completed"
    assert run.output() == "from the code\n"


async def test_code_that_is_not_there_is_a_reason_of_its_own(attempt):
    exit = await attempt(["true"], code_artifact="nothing@latest").run()
    assert exit.reason == "CodeUnavailable"
    assert "nothing@latest" in exit.message


async def test_code_from_git_is_checked_out_at_its_ref(attempt, tmp_path):
    source = folder_with(tmp_path / "source", train__sh="echo first")
    git = ["git", "-C", str(source), "-c", "user.name=n", "-c", "user.email=e@example.org"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"], ["tag", "v1"]):
        subprocess.run([*git, *command], check=True)
    (source / "train.sh").write_text("echo second")
    subprocess.run([*git, "commit", "-qam", "two"], check=True)
    run = attempt(["sh", "train.sh"], code_git={"url": source.as_uri(), "ref": "v1"})
    assert (await run.run()).reason == "Completed"
    assert run.output() == "first\n"


async def test_what_code_brings_along_as_results_is_removed_and_told(attempt, yard, tmp_path):
    code = folder_with(tmp_path / "code", train__sh="ls; true")
    for name in ("exports/model.bin", "checkpoints/step-9.txt"):
        (code / name).parent.mkdir()
        (code / name).write_text("of an earlier run")
    await store(yard, code, "code")
    outputs = [{"path": "exports", "artifact": "model"}]
    run = attempt(["sh", "train.sh"], code_artifact="code", outputs=outputs, checkpoints=CHECKPOINTS)
    exit = await run.run()
    assert (exit.reason, run.output()) == ("OutputsNotStored", "checkpoints\ntrain.sh\n")
    assert not await versions(yard, "checkpoint")
    notes = [message.note for message in yard.launcher.heard if message.HasField("note")]
    [told] = [note.text for note in notes if note.reason == "ResultsInCode"]
    assert "'checkpoints', 'exports'" in told


@pytest.mark.parametrize(
    ("command", "paths", "unstored"),
    [
        ("true", ["data", "data/first.txt", "."], ["data", "data/first.txt", "."]),
        (
            "echo more >> data/first.txt; mv data/second.txt made",
            ["data", "made", "data/third.txt"],
            ["data/third.txt"],
        ),
    ],
    ids=["untouched", "changed"],
)
async def test_what_was_there_before_the_workers_is_no_output(attempt, yard, tmp_path, command, paths, unstored):
    """Inputs are no result of the job, unless its workers changed them."""
    given = folder_with(tmp_path / "data", first__txt="1", second__txt="2", third__txt="3")
    await store(yard, given, "words", kind="data")
    outputs = [{"path": path, "artifact": f"model-{number}"} for number, path in enumerate(paths)]
    run = attempt(["sh", "-c", command], inputs=[{"artifact": "words", "path": "data"}], outputs=outputs)
    exit = await run.run()
    assert [text.partition("'")[2].partition("'")[0] for text in exit.unstored] == unstored
    assert "holds only the code or inputs that were there before" in exit.message
    assert len(await versions(yard, "output")) == len(paths) - len(unstored)


async def test_results_behind_a_link_that_leaves_the_job_are_left_alone(attempt, yard, tmp_path):
    elsewhere = folder_with(tmp_path / "elsewhere", model__bin="not the job's")
    source = folder_with(tmp_path / "source", train__sh="true")
    (source / "out").symlink_to(elsewhere)
    git = ["git", "-C", str(source), "-c", "user.name=n", "-c", "user.email=e@example.org"]
    for command in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], check=True)
    outputs = [{"path": "out/model.bin", "artifact": "model"}]
    await attempt(["sh", "train.sh"], code_git={"url": source.as_uri(), "ref": "main"}, outputs=outputs).run()
    assert (elsewhere / "model.bin").read_text() == "not the job's"


async def test_git_gets_what_the_job_says_for_it_and_no_password_of_a_url_is_told(attempt, tmp_path):
    source = folder_with(tmp_path / "source", train__sh="echo private")
    git = ["git", "-C", str(source), "-c", "user.name=n", "-c", "user.email=e@example.org"]
    for command in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], check=True)
    url = "http://me:s3cret@127.0.0.1:9/team/train.git"
    instead = {
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.{source.as_uri()}.insteadOf",
        "GIT_CONFIG_VALUE_0": url,
    }
    run = attempt(["sh", "train.sh"], code_git={"url": url, "ref": "main"}, env=instead)
    assert (await run.run()).reason == "Completed"
    exit = await attempt(["true"], code_git={"url": url, "ref": "main"}).run()
    assert exit.reason == "CodeUnavailable"
    assert "http://127.0.0.1:9/team/train.git at main" in exit.message
    assert "s3cret" not in str(exit)


async def test_a_git_ref_that_is_not_there_is_code_unavailable_with_gits_own_words(attempt, tmp_path):
    exit = await attempt(["true"], code_git={"url": (tmp_path / "nowhere").as_uri(), "ref": "main"}).run()
    assert exit.reason == "CodeUnavailable"
    assert "nowhere" in exit.message


async def test_inputs_are_in_place_before_the_workers_start(attempt, yard, tmp_path):
    await store(yard, folder_with(tmp_path / "data", words__txt="some data\n"), "words", kind="data")
    run = attempt(["cat", "data/set/words.txt"], inputs=[{"artifact": "words", "path": "data/set"}])
    await run.run()
    assert run.output() == "some data\n"


async def test_what_a_job_is_given_is_known_as_used_by_it(attempt, yard, tmp_path):
    data = await store(yard, folder_with(tmp_path / "data", words__txt="some data\n"), "words", kind="data")
    code = await store(yard, folder_with(tmp_path / "code", train__sh="cp data/words.txt made"), "code")
    run = attempt(
        ["sh", "train.sh"],
        code_artifact="code",
        inputs=[{"artifact": "words", "path": "data"}],
        outputs=[{"path": "made", "artifact": "made"}],
    )
    await run.run()
    async with yard.artifacts_stub() as stub:
        request = artifacts_pb2.GetLineageRequest(workspace="default", job_id=run.job_id)
        of_job = await stub.GetLineage(request)
        of_data = await stub.GetLineage(artifacts_pb2.GetLineageRequest(workspace="default", reference="words"))
    assert {version.id for version in of_job.made_from} == {data.id, code.id}
    assert [version.name for version in of_job.made] == ["made"]
    assert [version.name for version in of_data.made] == ["made"]
    assert [use.job_id for use in of_data.used_by] == [run.job_id]


async def test_an_input_that_is_not_there_is_a_reason_of_its_own(attempt):
    exit = await attempt(["true"], inputs=[{"artifact": "nothing", "path": "data"}]).run()
    assert exit.reason == "InputUnavailable"


async def test_outputs_are_stored_when_the_workers_succeeded(attempt, yard, tmp_path):
    script = "mkdir -p exports && echo model > exports/model.bin"
    run = attempt(["sh", "-c", script], outputs=[{"path": "exports", "artifact": "model"}])
    assert (await run.run()).acknowledged
    async with yard.artifacts_stub() as stub:
        version = await download(stub, "model@1", tmp_path / "got", workspace="default")
    assert (tmp_path / "got" / "model.bin").read_text() == "model\n"
    assert version.producer.attempt_id == run.id


async def test_outputs_of_failed_workers_are_not_stored(attempt, yard):
    run = attempt(["sh", "-c", "touch model; exit 1"], outputs=[{"path": "model", "artifact": "model"}])
    await run.run()
    assert await versions(yard, "output") == []


async def test_an_output_that_was_not_written_fails_the_job_and_is_named(attempt):
    exit = await attempt(["true"], outputs=[{"path": "exports", "artifact": "model"}]).run()
    assert (exit.reason, exit.acknowledged) == ("OutputsNotStored", False)
    assert "'exports' does not exist" in exit.unstored[0]


async def test_outputs_are_never_taken_from_outside_of_the_jobs_folder(attempt, yard, tmp_path):
    elsewhere = folder_with(tmp_path / "elsewhere", model__bin="not the job's")
    script = (
        f"ln -s {elsewhere} away; ln -s {elsewhere} parent; mkdir -p made && echo mine > made/model.bin; "
        "ln -s made inside; ln -s made/model.bin file"
    )
    paths = {"away": "away", "nested": "parent/model.bin", "inside": "inside", "file": "file"}
    outputs = [{"path": path, "artifact": name} for name, path in paths.items()]
    exit = await attempt(["sh", "-c", script], outputs=outputs).run()
    assert exit.reason == "OutputsNotStored"
    assert [("outside of the job's folder" in each, str(elsewhere) in each) for each in exit.unstored] == [
        (True, True),
        (True, True),
        (False, False),
    ]
    assert "'file' is a link to 'made/model.bin': write or copy the file itself there" in exit.unstored[2]
    assert [version.name for version in await versions(yard, "output")] == ["inside"]


@pytest.mark.parametrize("link", ["checkpoints/step-1.txt", "checkpoints"])
async def test_checkpoints_are_never_taken_from_outside_of_the_jobs_folder(attempt, yard, tmp_path, link):
    elsewhere = folder_with(tmp_path / "elsewhere", step_1__txt="not the job's")
    script = f"rm -rf {link} && ln -s {elsewhere} {link}"
    (elsewhere / "step_1.txt").rename(elsewhere / "step-1.txt")
    exit = await attempt(["sh", "-c", script], checkpoints=CHECKPOINTS).run()
    assert exit.reason == "OutputsNotStored"
    assert "checkpoint 'step-1.txt'" in exit.unstored[0] and "outside of the job's folder" in exit.unstored[0]
    assert not await versions(yard, "checkpoint")
    notes = [message.note for message in yard.launcher.heard if message.HasField("note")]
    assert [note.reason for note in notes if note.reason.startswith("Checkpoint")] == ["CheckpointNotStored"]


async def test_nothing_is_written_through_a_link_of_the_code_that_leaves_the_job(attempt, yard, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    source = folder_with(tmp_path / "source", train__sh="true")
    (source / "away").symlink_to(elsewhere)
    git = ["git", "-C", str(source), "-c", "user.name=n", "-c", "user.email=e@example.org"]
    for command in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], check=True)
    await store(yard, folder_with(tmp_path / "data", words__txt="some data\n"), "words", kind="data")
    code = {"url": source.as_uri(), "ref": "main"}
    inputs = [{"artifact": "words", "path": "away/words"}]
    fetching = await attempt(["true"], code_git=code, inputs=inputs).run()
    saving = await attempt(["true"], code_git=code, checkpoints=CHECKPOINTS | {"path": "away/checkpoints"}).run()
    assert [fetching.reason, saving.reason] == ["InputUnavailable", "CodeUnavailable"]
    assert all("outside of the job's folder" in exit.message for exit in (fetching, saving))
    assert not list(elsewhere.iterdir())


async def test_checkpoints_are_stored_with_step_cut_and_newest_values(attempt, yard):
    run = attempt(["python-code", TRAIN], checkpoints=CHECKPOINTS)
    assert (await run.run()).acknowledged
    found = {each.checkpoint.step: each.checkpoint for each in await versions(yard, "checkpoint")}
    assert 8 in found
    assert list(found[8].cut.values()) == [9]
    assert found[8].metrics["loss"] == pytest.approx(1 / 9)


async def test_a_checkpoint_is_there_only_once_the_rows_in_front_of_its_cut_are_stored(attempt, yard):
    yard.door.open.clear()
    run = attempt(["python-code", TRAIN], checkpoints=CHECKPOINTS)
    await run.start()
    await yard.launcher.wait_for(lambda each: each.phase.phase == "finishing")
    await yard.door.wait_for("PutChunks")
    await yard.launcher.wait_for_heartbeats(5)
    assert "Commit" not in yard.door.came
    yard.door.open.set()
    await run.wait()
    assert run.exit().acknowledged
    assert 8 in [each.checkpoint.step for each in await versions(yard, "checkpoint")]


async def test_rows_that_metrics_refuses_for_good_hold_up_no_checkpoint(attempt, yard):
    run = attempt(["python-code", TRAIN], checkpoints=CHECKPOINTS)
    newer = attempt(["true"], job_id=run.job_id, fence=2)
    async with yard.metrics_stub() as stub:
        facts = {"workspace": "default", "job_id": run.job_id, "fence": 2}
        await stub.OpenRun(metrics_pb2.OpenRunRequest(run=metrics_pb2.Run(id=newer.id, name="newer", **facts)))
    exit = await run.run()
    assert not exit.acknowledged
    assert "PutChunks" in yard.door.came and "Commit" in yard.door.came


async def test_storing_a_checkpoint_leaves_the_processor_to_the_workers(attempt):
    code = (
        "import os, pathlib, time\n"
        "draft = pathlib.Path('draft'); draft.write_text('1'); draft.rename('checkpoints/step-1.txt')\n"
        "def agent(): return os.getpriority(os.PRIO_PROCESS, os.getppid())\n"
        "while agent() == 0: time.sleep(0.01)\n"
        "print(agent(), os.getpriority(os.PRIO_PROCESS, 0))"
    )
    run = attempt(["python-code", code], checkpoints=CHECKPOINTS)
    assert (await run.run()).acknowledged
    assert run.output() == f"{courtesy.NICENESS} 0\n"


async def test_an_agent_stays_small_while_it_stores_a_large_checkpoint(attempt, yard, monkeypatch, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(TELL_MEMORY.format(path=tmp_path / "peak"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code = (
        "import os, pathlib\n"
        "with open('draft', 'wb') as draft:\n"
        "    for _ in range(96): draft.write(os.urandom(2**20))\n"
        "os.rename('draft', 'checkpoints/step-1.txt')"
    )
    assert (await attempt(["python-code", code], checkpoints=CHECKPOINTS).run()).acknowledged
    [version] = await versions(yard, "checkpoint")
    assert version.size == 96 * 2**20
    assert int((tmp_path / "peak").read_text()) <= 64 * 1024  # KiB


async def test_the_next_attempt_resumes_and_the_series_has_no_gap_and_no_doubled_step(attempt, yard):
    first = attempt(["python-code", TRAIN], checkpoints=CHECKPOINTS, env={"DIE_AT": "7"})
    exit = await first.run()
    assert (exit.signal, exit.progressed) == ("SIGKILL", True)
    second = attempt(["python-code", TRAIN], checkpoints=CHECKPOINTS, job_id=first.job_id, fence=2)
    exit = await second.run()
    assert second.output() == "starting at 6\n"
    assert exit.resumed_from in {each.id for each in await versions(yard, "checkpoint")}
    assert await second.series("loss") == {step: 1.0 / (step + 1) for step in range(10)}


async def test_the_next_attempt_resumes_from_the_newest_step_although_an_older_one_was_stored_later(attempt):
    late = """
import os, pathlib
folder = pathlib.Path(os.environ["TRAINYARD_CHECKPOINT_DIR"])
for step in (5, 2):
    (folder / "draft").write_text(str(step))
    (folder / "draft").rename(folder / f"step-{step}.txt")
"""
    first = attempt(["python-code", late], checkpoints={**CHECKPOINTS, "keep_last": 0})
    await first.run()
    second = attempt(["python-code", TRAIN], checkpoints=CHECKPOINTS, job_id=first.job_id, fence=2)
    await second.run()
    assert second.output() == "starting at 6\n"


async def test_a_third_attempt_still_hides_what_the_first_wrote_beyond_its_checkpoint(attempt, yard):
    first = attempt(["python-code", TRAIN], checkpoints=CHECKPOINTS, env={"DIE_AT": "4"})
    await first.run()
    second = attempt(["python-code", TRAIN], checkpoints=CHECKPOINTS, env={"DIE_AT": "7"}, job_id=first.job_id, fence=2)
    await second.run()
    third = attempt(["python-code", TRAIN], checkpoints=CHECKPOINTS, job_id=first.job_id, fence=3)
    await third.run()
    assert third.output() == "starting at 6\n"
    assert await third.series("loss") == {step: 1.0 / (step + 1) for step in range(10)}


async def test_a_damaged_checkpoint_is_reported_and_the_next_older_one_taken(attempt, yard):
    first = attempt(["python-code", TRAIN], checkpoints={**CHECKPOINTS, "keep_last": 0}, env={"DIE_AT": "7"})
    await first.run()
    damage(yard.home, b"5")
    second = attempt(["python-code", TRAIN], checkpoints=CHECKPOINTS, job_id=first.job_id, fence=2)
    await second.run()
    assert "starting at 3" in second.output()
    assert "CheckpointDamaged" in yard.launcher.notes()


async def test_a_rejected_checkpoint_is_not_resumed_from(attempt, yard):
    first = attempt(["python-code", TRAIN], checkpoints={**CHECKPOINTS, "keep_last": 0}, env={"DIE_AT": "7"})
    await first.run()
    newest = (await versions(yard, "checkpoint"))[0]
    second = attempt(
        ["python-code", TRAIN], checkpoints=CHECKPOINTS, job_id=first.job_id, fence=2, rejected_checkpoints=[newest.id]
    )
    await second.run()
    assert second.output() == "starting at 3\n"


async def test_an_attempt_of_an_old_fence_stores_no_checkpoint(attempt, yard):
    old = attempt(["python-code", TRAIN], checkpoints=CHECKPOINTS, job_id="11111111-1111-4111-8111-111111111111")
    new = attempt(["python-code", TRAIN], checkpoints=CHECKPOINTS, job_id=old.job_id, fence=2)
    await new.run()
    before = {each.id for each in await versions(yard, "checkpoint")}
    exit = await old.run()
    assert not exit.acknowledged
    assert {each.id for each in await versions(yard, "checkpoint")} == before


async def test_a_requirements_file_becomes_an_environment_that_is_built_once(attempt, yard, tmp_path):
    package = folder_with(
        tmp_path / "code" / "greeting",
        setup__py="from setuptools import setup; setup(name='greeting', version='1', py_modules=['greeting'])",
    )
    (package.parent / "requirements.txt").write_text("# nothing but the interpreter\n")
    (package.parent / "show.py").write_text("import sys; print(sys.prefix)")
    await store(yard, package.parent, "code")
    prefixes = []
    for _ in range(2):
        run = attempt(["python", "show.py"], code_artifact="code", requirements="requirements.txt")
        exit = await run.run()
        assert exit.reason == "Completed", exit
        prefixes.append(run.output())
    assert prefixes[0] == prefixes[1]
    assert str(yard.home / "cache" / "envs") in prefixes[0]
    assert yard.launcher.notes().count("BuildingEnvironment") == 1


async def test_requirements_that_cannot_be_installed_fail_with_uvs_own_words(attempt, yard, tmp_path):
    await store(yard, folder_with(tmp_path / "code", requirements__txt="./no-such-package\n"), "code")
    exit = await attempt(["true"], code_artifact="code", requirements="requirements.txt").run()
    assert exit.reason == "EnvironmentFailed"
    assert "no-such-package" in exit.message


def damage(home, content):
    """Changes a stored chunk on disk: the only one of its pack, behind the pack's header."""
    hash = blake3(content).digest()
    [pack] = [path for path in (home / "packs").rglob("*") if path.is_file() and hash in path.read_bytes()]
    pack.chmod(0o600)
    with pack.open("r+b") as file:
        file.seek(8)
        file.write(b"?")


def wait_for_text(path, text):
    """Until a file that another process writes holds `text`: one `tail` reads as it grows."""
    with subprocess.Popen(["tail", "-n", "+1", "-f", path], stdout=subprocess.PIPE, text=True) as tail:
        for line in tail.stdout:
            if text in line:
                break
        tail.kill()
