"""What workers do to the files and folders the agent watches."""

import asyncio
import os
import shutil
from functools import partial
from pathlib import Path

import pytest
from trainyard.agent import output
from trainyard.agent.candidates import Candidates
from trainyard.agent.changes import Changes
from trainyard.agent.lines import Flood
from trainyard.agent.output import Output

from scripts.testbed.patience import PATIENCE_S

# A user namespace has limits of its own, so other programs of the user notice nothing.
LIMITED = 'echo {instances} > /proc/sys/user/max_inotify_instances && exec "$@"'
TRAIN = """
import os, pathlib, sys
print("begun", flush=True)
path = pathlib.Path(os.environ["TRAINYARD_CHECKPOINT_DIR"], "step-7.txt")
with path.open("w") as file:
    file.write("half")
    file.flush()
    sys.stdin = open(os.environ["MAY_CLOSE"])
print("closed", flush=True)
open(os.environ["MAY_END"])
"""
CHECKPOINTS = {"path": "checkpoints", "pattern": "step-{step}.txt", "settle_s": 0.1, "keep_last": 2}


@pytest.fixture
async def changes():
    changes = Changes(lambda reason, text: pytest.fail(f"{reason}: {text}"))
    yield changes
    changes.close()


@pytest.mark.parametrize(("instances", "polled"), [(0, True), (1, False)])
async def test_an_agent_needs_one_inotify_instance_at_most(attempt, yard, tmp_path, instances, polled):
    """Output and checkpoints arrive while the worker runs, also where the kernel has no instance left."""
    gates = {name: str(tmp_path / name) for name in ("MAY_CLOSE", "MAY_END")}
    for gate in gates.values():
        os.mkfifo(gate)
    run = attempt(["python-code", TRAIN], checkpoints=CHECKPOINTS, env=gates)
    await run.start("unshare", "-Ur", "sh", "-c", LIMITED.format(instances=instances), "sh")
    await yard.launcher.wait_for_line("begun")
    await asyncio.to_thread(Path(gates["MAY_CLOSE"]).write_text, "")
    await yard.launcher.wait_for_line("closed")
    await yard.door.wait_for("Commit")
    await asyncio.to_thread(Path(gates["MAY_END"]).write_text, "")
    assert await run.wait() == 0
    assert run.exit().reason == "Completed", run.log()
    assert ("FilesPolled" in yard.launcher.notes()) is polled


async def carried(path, place=b"") -> list[str]:
    lines: list[str] = []
    tail = Output({0: path}, lambda _rank, more, _place: lines.extend(more), places={0: place})
    await tail.drain()
    return lines


async def test_output_that_is_too_far_behind_is_skipped_with_a_mark(tmp_path, monkeypatch):
    monkeypatch.setattr(output, "MAX_BEHIND_BYTES", 4 * output.READ_BYTES)
    monkeypatch.setattr(output, "KEPT_BYTES", output.READ_BYTES)
    path = tmp_path / "rank-0.log"
    path.write_bytes(b"".join(b"line %06d\n" % number for number in range(500_000)))
    lines = await carried(path)
    assert lines[0] == "line 000000" and lines[-1] == "line 499999"
    assert [line for line in lines if "were not carried" in line] == [
        "[trainyard: 5 MiB were not carried; the raw output has them]"
    ]


async def test_output_that_is_not_far_behind_is_carried_whole(tmp_path):
    path = tmp_path / "rank-0.log"
    path.write_bytes(b"".join(b"line %d\n" % number for number in range(50_000)))
    assert await carried(path) == [f"line {number}" for number in range(50_000)]


async def test_who_reads_on_at_any_place_carries_what_the_one_before_had_not(tmp_path, monkeypatch):
    monkeypatch.setattr(output, "READ_BYTES", 7)
    path = tmp_path / "rank-0.log"
    path.write_bytes("one\ntwö\n10%\r20%\r\r\nthree\r\nlast".encode())
    carried_at: list[tuple[list[str], bytes]] = []
    await Output({0: path}, lambda _rank, lines, place: carried_at.append((lines, place))).drain()
    whole = [line for lines, _ in carried_at for line in lines]
    before: list[str] = []
    for lines, place in carried_at:
        before += lines
        assert before + await carried(path, place) == whole == ["one", "twö", "20%", "three", "last"]


def ignore(*_):
    """Takes what a test does not look at."""


async def test_lines_that_were_dropped_are_named_by_who_reads_on(tmp_path):
    path = tmp_path / "rank-0.log"
    path.write_bytes(b"a\nb\nc\n")
    places: list[bytes] = []
    flood = partial(Flood, burst=1, lines_per_s=0)
    await Output({0: path}, lambda _rank, _lines, place: places.append(place), flood).drain()
    path.write_bytes(b"a\nb\nc\nd\n")
    assert await carried(path, places[0]) == ["[trainyard: 2 lines were not carried; the raw output has them]", "d"]


async def test_a_checkpoint_folder_that_the_script_removed_holds_nothing(tmp_path, changes):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    candidates = Candidates(folder, "step-{step}.pt", 0.1, ignore, ignore, changes, root=tmp_path)
    shutil.rmtree(folder)
    candidates.look_at_all()
    assert candidates.finish() == []


async def test_entries_that_cannot_be_checkpoints_are_never_opened(tmp_path, changes):
    found, refused = [], []
    candidates = Candidates(
        tmp_path, "step-{step}.pt", 0.0, found.append, lambda name, _: refused.append(name), changes, root=tmp_path
    )
    os.mkfifo(tmp_path / "step-1.pt")  # opening it would wait for a writer
    (tmp_path / "step-2.pt").symlink_to("/dev/zero")
    (tmp_path / "step-3.pt").symlink_to("step-3.pt")
    (tmp_path / f"step-{10**19}.pt").write_text("a step that no counter holds")
    (tmp_path / "step-5.pt").write_text("whole")
    assert candidates.finish() == ["step-1.pt"]
    assert refused == ["step-2.pt", "step-3.pt"]
    assert [candidate.step for candidate in found] == [5]


async def test_a_folder_outside_of_the_job_is_neither_walked_nor_watched(tmp_path, changes):
    job, found, refused = tmp_path / "job", [], []
    job.mkdir()
    candidates = Candidates(
        job, "step-{step}", 0.0, found.append, lambda name, error: refused.append((name, str(error))), changes, root=job
    )
    (job / "step-1").symlink_to("/")
    (job / "made").mkdir()
    (job / "made" / "weights").write_text("whole")
    (job / "step-2").symlink_to("made")
    candidates.look_at_all()
    assert candidates.finish() == []
    assert [each.path.name for each in found] == ["step-2"]
    [(name, why)] = refused
    assert (name, "to '/', outside of the job's folder" in why) == ("step-1", True)


async def test_nothing_behind_a_link_that_leaves_the_job_is_watched(tmp_path, changes, monkeypatch):
    job, away, watched, seen = tmp_path / "job", tmp_path / "away", [], asyncio.Event()
    job.mkdir()
    (away / "inner").mkdir(parents=True)
    watch = changes.watch
    monkeypatch.setattr(changes, "watch", lambda path, *others: watched.append(path) or watch(path, *others))
    Candidates(job, "step-{step}", 0.0, ignore, lambda *_: seen.set(), changes, root=job)
    (tmp_path / "link").symlink_to(away)
    (tmp_path / "link").rename(job / "step-1")
    await asyncio.wait_for(seen.wait(), PATIENCE_S)
    assert watched == [job]


async def test_checkpoints_that_are_found_at_the_end_come_by_step_and_then_by_age(tmp_path, changes):
    found = []
    candidates = Candidates(tmp_path, "epoch-{step}*", 60.0, found.append, ignore, changes, root=tmp_path)
    for age, name in enumerate(["epoch-12", "epoch-2-b", "epoch-2-a", "epoch-9", "epoch-10"]):
        (tmp_path / name).write_text("whole")
        os.utime(tmp_path / name, ns=(age, age))
    assert candidates.finish() == []
    assert [each.path.name for each in found] == ["epoch-2-b", "epoch-2-a", "epoch-9", "epoch-10", "epoch-12"]
