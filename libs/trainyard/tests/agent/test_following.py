"""What workers do to the files and folders the agent watches."""

import os
import shutil

from trainyard.agent import output
from trainyard.agent.candidates import Candidates
from trainyard.agent.output import Output


async def carried(path) -> list[str]:
    lines: list[str] = []
    tail = Output({0: path}, lambda _rank, more: lines.extend(more))
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


async def test_a_checkpoint_folder_that_the_script_removed_holds_nothing(tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    candidates = Candidates(folder, "step-{step}.pt", 0.1, lambda _found: None)
    shutil.rmtree(folder)
    candidates.look_at_all()
    assert candidates.finish() == []


async def test_entries_that_cannot_be_checkpoints_are_never_opened(tmp_path):
    found = []
    candidates = Candidates(tmp_path, "step-{step}.pt", 0.0, found.append)
    os.mkfifo(tmp_path / "step-1.pt")  # opening it would wait for a writer
    (tmp_path / "step-2.pt").symlink_to("/dev/zero")
    (tmp_path / "step-3.pt").symlink_to("step-3.pt")
    (tmp_path / f"step-{10**19}.pt").write_text("a step that no counter holds")
    (tmp_path / "step-5.pt").write_text("whole")
    assert candidates.finish() == ["step-1.pt", "step-2.pt", "step-3.pt"]
    assert [candidate.step for candidate in found] == [5]
