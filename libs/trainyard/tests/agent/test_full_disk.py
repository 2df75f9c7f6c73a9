"""A node whose disk is full ends as what it was, and says so."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

FULL_TERMINATION_LOG = """
mount -t tmpfs tmpfs "$0"
for device in null zero urandom full; do touch "$0/$device"; mount --bind "/dev/$device" "$0/$device"; done
ln -s full "$0/termination-log"
mount --rbind "$0" /dev
exec "$@"
"""
FILL = "cat /dev/zero > filler 2>/dev/null; "


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[Path], None]]:
    """Puts a folder on a disk of one megabyte of its own."""
    mounted: list[Path] = []

    def mount(folder: Path) -> None:
        plan = (folder / "plan.json").read_bytes()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=True)
        mounted.append(folder)
        (folder / "plan.json").write_bytes(plan)

    yield mount
    for folder in mounted:
        subprocess.run(["umount", folder], check=True)


async def test_a_worker_that_succeeds_on_a_full_disk_leaves_the_record_of_its_success(attempt, small_disk, yard):
    """And its last lines, for which there was no room, are reported."""
    run = attempt(["sh", "-c", "echo short; " + FILL + "exit 0"])
    small_disk(run.folder)
    assert (await run.run()).reason == "Completed"
    assert run.output() == "short\n"
    assert bool(await run.stored_lines()) is not ("LinesLost" in yard.launcher.notes())


async def test_a_pod_whose_termination_message_finds_no_room_ends_as_what_it_was(attempt, yard, tmp_path):
    devices = tmp_path / "dev"
    devices.mkdir()
    run = attempt(["sh", "-c", "exit 3"], in_image=True)
    await run.start("unshare", "-m", "sh", "-ec", FULL_TERMINATION_LOG, devices)
    assert await run.wait() == 3
    told = (await yard.launcher.wait_for(lambda each: each.phase.phase == "ended")).phase.exit
    assert (told.reason, told.exit_code) == ("WorkerFailed", 3)
    assert "ExitNotRecorded" in yard.launcher.notes()


async def test_an_end_that_cannot_be_recorded_is_told_to_the_launcher(attempt, small_disk, yard):
    run = attempt(["sh", "-c", "rm ../exit.bin.new; " + FILL + "exit 3"])
    small_disk(run.folder)
    await run.start()
    assert await run.wait() == 0
    assert not (run.folder / "exit.bin").exists()
    told = (await yard.launcher.wait_for(lambda each: each.phase.phase == "ended")).phase.exit
    assert (told.reason, told.exit_code) == ("WorkerFailed", 3)
    assert "ExitNotRecorded" in yard.launcher.notes()
