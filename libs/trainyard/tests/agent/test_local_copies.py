"""A checkpoint that the store's retention dropped does not stay in the attempt's folder either."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import uuid

import pytest
from trainyard import copies
from trainyard.artifacts import upload
from trainyard_protos.v1 import artifacts_pb2

SAVE = """
import os, pathlib, time
folder = pathlib.Path(os.environ["TRAINYARD_CHECKPOINT_DIR"])
def save(step):
    draft = folder / "draft"
    draft.mkdir()
    (draft / "weights").write_text(f"weights of step {step}")
    draft.rename(folder / f"step-{step}")
    print("saved", step, flush=True)
def gate(name):
    open(name).read()
"""
CHECKPOINTS = {"path": "checkpoints", "pattern": "step-{step}", "settle_s": 0.1, "keep_last": 2}


def record(folder, entry):
    copies.record_checkpoint(folder, entry, copies.signature(entry), copies.complete_ns(entry))


async def stored_steps(yard):
    async with yard.artifacts_stub() as stub:
        request = artifacts_pb2.ListVersionsRequest(workspace="default", kind="checkpoint")
        return sorted(version.checkpoint.step for version in (await stub.ListVersions(request)).versions)


def with_gate(run, *names):
    (run.folder / "work").mkdir()
    for name in names:
        os.mkfifo(run.folder / "work" / name)
    return run


def open_gate(run, name):
    return asyncio.to_thread((run.folder / "work" / name).write_text, "\n")


def steps_in(run):
    return sorted(int(path.name.removeprefix("step-")) for path in (run.folder / "work/checkpoints").glob("step-*"))


async def until(condition):
    """Waits for what another process does to files, of which no event tells this one."""
    from scripts.testbed.patience import PATIENCE_S

    async with asyncio.timeout(PATIENCE_S):
        while not await condition():
            await asyncio.sleep(0.02)


async def test_a_copy_goes_when_retention_drops_its_checkpoint_and_not_while_it_is_read(attempt, yard):
    code = f"{SAVE}\nsave(0); held = open(folder / 'step-0/weights')\nfor step in range(1, 6): save(step)\n"
    code += "gate('first'); held.close(); save(6); gate('second')"
    run = with_gate(attempt(["python-code", code], checkpoints=CHECKPOINTS), "first", "second")
    await run.start()

    async def settled(*steps):
        return (await stored_steps(yard), steps_in(run)) == ([*steps[-2:]], [*steps])

    await until(lambda: settled(0, 4, 5))
    await open_gate(run, "first")
    await until(lambda: settled(5, 6))
    await open_gate(run, "second")
    assert await run.wait() == 0
    assert run.exit().acknowledged


async def test_a_resumed_attempt_removes_the_checkpoint_that_was_put_back(attempt, yard):
    first = attempt(["python-code", f"{SAVE}\nsave(1); save(2)"], checkpoints=CHECKPOINTS)
    await first.run()
    code = f"{SAVE}\nassert os.environ['TRAINYARD_RESUME_FROM'].endswith('step-2'); save(3); save(4); gate('end')"
    again = {"job_id": first.job_id, "attempt_id": str(uuid.uuid4()), "fence": 2}
    run = with_gate(attempt(["python-code", code], checkpoints=CHECKPOINTS, **again), "end")
    await run.start()

    async def settled():
        return steps_in(run) == [3, 4]

    await until(settled)
    await open_gate(run, "end")
    assert await run.wait() == 0
    assert (await stored_steps(yard), run.exit().resumed_from != "") == ([3, 4], True)


async def test_an_agent_killed_before_it_removed_a_copy_leaves_a_record_by_which_the_copy_goes(attempt, yard):
    run = with_gate(
        attempt(
            ["python-code", f"{SAVE}\nfor step in range(5): save(step)\ngate('end')"],
            checkpoints=CHECKPOINTS | {"keep_last": 1},
        ),
        "end",
    )
    await run.start()

    async def stored():
        return await stored_steps(yard) == [4]

    await until(stored)
    run.process.send_signal(signal.SIGKILL)
    await run.wait()
    resumable = run.folder / "work/checkpoints/step-4"
    (run.folder / "work/notes").write_text("only here")
    copies.remove_all(run.folder)
    kept = steps_in(run)  # step 4 alone if the agent was killed between the commit and its record
    assert kept in ([], [4])
    assert not copies.has_copies(run.folder)
    assert (run.folder / "work/notes").exists()
    again = {"job_id": run.job_id, "attempt_id": str(uuid.uuid4()), "fence": 2}
    resumed = attempt(["sh", "-c", "cat $TRAINYARD_RESUME_FROM/weights"], checkpoints=CHECKPOINTS, **again)
    await resumed.run()
    assert (resumed.output(), resumable.exists()) == ("weights of step 4", kept == [4])


async def test_the_copies_of_an_attempt_that_is_over_go_and_what_changed_stays(attempt, yard, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    (data / "words").write_text("words")
    async with yard.artifacts_stub() as stub:
        for name in ("words", "texts"):
            await upload(stub, data, workspace="default", name=name, kind="data")
    inputs = [{"artifact": name, "path": name} for name in ("words", "texts")]
    code = f"{SAVE}\nsave(1); save(2); gate('stored')\n(folder / 'step-1/weights').write_text('changed')\n"
    code += "pathlib.Path('texts/more').write_text('mine')"
    run = with_gate(attempt(["python-code", code], checkpoints=CHECKPOINTS, inputs=inputs), "stored")
    await run.start()

    async def stored():
        return await stored_steps(yard) == [1, 2]

    await until(stored)
    await open_gate(run, "stored")
    await run.wait()
    # Changed in place after it was stored: step 1 was stored again, or is not what was stored.
    (run.folder / "work/checkpoints/step-1/weights").write_text("changed once more")
    copies.remove_all(run.folder)
    assert steps_in(run) == [1]
    assert not (run.folder / "work/words").exists()
    assert sorted(path.name for path in (run.folder / "work/texts").iterdir()) == ["more", "words"]


async def test_copies_that_are_part_of_an_output_stay_until_it_is_stored(attempt, yard):
    code = f"{SAVE}\nfor step in range(4): save(step)\ngate('end')"
    outputs = [{"path": "checkpoints", "artifact": "all"}]
    run = with_gate(attempt(["python-code", code], checkpoints=CHECKPOINTS | {"keep_last": 1}, outputs=outputs), "end")
    await run.start()

    async def stored():
        return await stored_steps(yard) == [3]

    await until(stored)
    await open_gate(run, "end")
    assert await run.wait() == 0
    async with yard.artifacts_stub() as stub:
        request = artifacts_pb2.ListVersionsRequest(workspace="default", kind="output")
        assert [version.files for version in (await stub.ListVersions(request)).versions] == [4]


async def test_copies_of_an_output_that_could_not_be_stored_stay(attempt, yard):
    code = f"{SAVE}\nfor step in range(3): save(step)\ngate('end')"
    outputs = [{"path": name, "artifact": "all"} for name in ("checkpoints", "never-written")]
    run = with_gate(attempt(["python-code", code], checkpoints=CHECKPOINTS | {"keep_last": 1}, outputs=outputs), "end")
    await run.start()

    async def stored():
        return await stored_steps(yard) == [2]

    await until(stored)
    await open_gate(run, "end")
    await run.wait()
    assert any("never-written" in each for each in run.exit().unstored)
    copies.remove_all(run.folder)
    assert steps_in(run) == [0, 1, 2]


async def test_copies_of_an_output_go_once_it_is_stored(attempt, yard):
    outputs = [{"path": "checkpoints", "artifact": "all"}]
    run = attempt(["python-code", f"{SAVE}\nsave(1); save(2)"], checkpoints=CHECKPOINTS, outputs=outputs)
    await run.run()
    assert steps_in(run) == [1, 2]
    copies.remove_all(run.folder)
    assert steps_in(run) == []


@pytest.mark.parametrize("when", ["running", "over"])
def test_other_content_of_equal_size_and_time_is_no_copy(tmp_path, when):
    entry = tmp_path / "work/step-1"
    entry.mkdir(parents=True)
    (entry / "weights").write_text("stored")
    of, since_ns = copies.signature(entry), copies.complete_ns(entry)
    record(tmp_path, entry)
    changed_later(entry / "weights", "script", since_ns)
    assert copies.signature(entry) == of
    if when == "running":
        assert copies.remove_checkpoint(tmp_path, entry, of, since_ns)
    else:
        copies.remove_all(tmp_path)
    assert (entry / "weights").read_text() == "script"


def changed_later(path, text, since_ns):
    """Writes with the times of before, until the clock of the file system has advanced."""
    before = path.stat()
    while path.stat().st_ctime_ns <= since_ns:
        path.write_text(text)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


MOUNTED = """
import subprocess, sys
from pathlib import Path
from trainyard import copies
folder = Path(sys.argv[1])
mine, entry, other = folder / "my own", folder / "work/a copy", folder / "work/step-2"
covered = folder / "work/covered"
for path in (mine, entry / "here", other, covered):
    path.mkdir(parents=True)
(mine / "file").write_text("mine")
since_ns = copies.complete_ns(folder)
subprocess.run(["mount", "--bind", mine, entry / "here"], check=True)
subprocess.run(["mount", "--bind", mine, covered], check=True)
copies.record_input(folder, entry, since_ns)
copies.record_input(folder, covered, since_ns)
copies.record_input(folder, other, since_ns)
copies.remove_all(folder)
print((mine / "file").exists(), other.exists(), copies.has_copies(folder))
"""


def test_what_is_mounted_in_a_copy_stays(tmp_path):
    command = ["unshare", "--user", "--map-root-user", "--mount", sys.executable, "-c", MOUNTED, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.split() == ["True", "False", "False"], done.stderr


ON_A_VOLUME = """
import os, signal, shutil, subprocess, sys
from pathlib import Path
from trainyard import copies
folder, volume = Path(sys.argv[1]), Path(sys.argv[1]) / "work"
volume.mkdir()
subprocess.run(["mount", "-t", "tmpfs", "tmpfs", volume], check=True)
for step in (1, 2, 3):
    (volume / f"step-{step}").mkdir()
    (volume / f"step-{step}/weights").write_text("weights")
entries = [volume / f"step-{step}" for step in (1, 2, 3)]
for entry in entries:
    copies.record_checkpoint(folder, entry, copies.signature(entry), copies.complete_ns(entry))
names, rmtree = [], shutil.rmtree
def list_names(path, *rest, **more):
    if Path(path).name.startswith("step-"):
        names.append([name for name in os.listdir(volume) if name.startswith("step-")])
    rmtree(path, *rest, **more)
shutil.rmtree = list_names
copies.remove_checkpoint(folder, entries[0], copies.signature(entries[0]), copies.complete_ns(entries[0]))
assert len(names) == 1 and "step-1" not in names[0], names
if os.fork() == 0:
    shutil.rmtree = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    copies.remove_checkpoint(folder, entries[1], copies.signature(entries[1]), copies.complete_ns(entries[1]))
os.wait()
left = os.listdir(volume)
copies.remove_all(folder)
print(len(left), "step-2" in left, os.listdir(volume))
"""


def test_copies_on_a_volume_lose_their_name_at_once_and_a_removal_that_is_killed_is_completed(tmp_path):
    command = ["unshare", "--user", "--map-root-user", "--mount", sys.executable, "-c", ON_A_VOLUME, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == "2 False []\n", done.stderr


def test_a_link_where_a_copy_was_keeps_its_name(tmp_path):
    entry, moved = tmp_path / "work/step-1", tmp_path / "work/moved"
    entry.mkdir(parents=True)
    (entry / "weights").write_text("weights")
    of = copies.signature(entry)
    entry.rename(moved)
    entry.symlink_to("moved")
    assert copies.remove_checkpoint(tmp_path, entry, of, copies.complete_ns(entry))
    assert (entry / "weights").read_text() == "weights"


HALF_WAY = """
import os, shutil, signal, sys
from pathlib import Path
from trainyard import copies
def killed(path, *rest, **more):
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[2] == "bytes":
    shutil.rmtree = killed
else:
    Path.rename = killed
copies.remove_all(Path(sys.argv[1]))
"""


@pytest.mark.parametrize("at", ["name", "bytes"])
def test_a_removal_that_is_killed_is_completed_by_the_next(tmp_path, at):
    for step in (1, 2):
        entry = tmp_path / f"work/step-{step}"
        entry.mkdir(parents=True)
        (entry / "weights").write_text("weights")
        record(tmp_path, entry)
    assert subprocess.run([sys.executable, "-c", HALF_WAY, tmp_path, at]).returncode == -signal.SIGKILL
    assert copies.has_copies(tmp_path)
    copies.remove_all(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["work"]
    assert not any((tmp_path / "work").iterdir())


def test_no_copy_is_removed_outside_of_the_folder(tmp_path):
    """The job may put a link where the copy was."""
    folder, mine = tmp_path / "node-0", tmp_path / "mine"
    entry = folder / "work/step-1"
    for path in (entry, mine):
        path.mkdir(parents=True)
        (path / "weights").write_text("weights")
    of = copies.signature(entry)
    os.utime(mine / "weights", ns=(of[0][2], of[0][2]))
    record(folder, entry)
    shutil.rmtree(entry)
    (folder / "work").rmdir()
    mine.rename(tmp_path / "step-1")
    (folder / "work").symlink_to(tmp_path)
    copies.remove_all(folder)
    assert (tmp_path / "step-1/weights").exists()
