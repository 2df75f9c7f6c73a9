"""What an operator asks of a yard."""

from pathlib import Path

import grpc
import pytest
from trainyard import errors
from trainyard.client import AsyncClient
from trainyard_protos.v1 import admin_pb2 as pb

from libs.trainyard.tests.client.scripted import Refusal, ScriptedYard


def piece(path: str, data: bytes = b"") -> pb.BackupResponse:
    return pb.BackupResponse(path=path, data=data)


@pytest.fixture
def backed(yard: ScriptedYard) -> ScriptedYard:
    """A yard with something to back up in every service."""
    yard.admin["scheduler.Backup"] = [piece("scheduler.db", b"one"), piece("scheduler.db", b"two")]
    yard.admin["metrics.Backup"] = [piece("metrics.db", b"m"), piece("runs/1/empty"), piece("runs/1/journal", b"j")]
    yard.admin["artifacts.Backup"] = [piece("artifacts.db", b"a")]
    return yard


async def test_a_backup_is_a_folder_of_all_files_that_is_there_when_it_is_whole(
    backed: ScriptedYard, tmp_path: Path
) -> None:
    target = tmp_path / "deep" / "copy"
    async with AsyncClient() as client:
        steps = []
        async for step in client.backup(target):
            steps.append(step)
            assert not target.exists()
    files = {path.relative_to(target).as_posix(): path.read_bytes() for path in target.rglob("*") if path.is_file()}
    assert files == {
        "scheduler.db": b"onetwo",
        "metrics.db": b"m",
        "runs/1/empty": b"",
        "runs/1/journal": b"j",
        "artifacts.db": b"a",
    }
    assert [(step.service, step.files, step.bytes) for step in steps][-1] == ("artifacts", 5, 9)
    assert target.stat().st_mode & 0o777 == 0o700
    assert (target / "metrics.db").stat().st_mode & 0o777 == 0o600


async def test_the_scheduler_is_copied_first_and_artifacts_last(backed: ScriptedYard, tmp_path: Path) -> None:
    async with AsyncClient() as client:
        _ = [step async for step in client.backup(tmp_path / "copy")]
    assert [name for name, _ in backed.calls] == ["scheduler.Backup", "metrics.Backup", "artifacts.Backup"]


@pytest.mark.parametrize("last", [Refusal(grpc.StatusCode.DATA_LOSS, "a chunk is damaged"), "die"])
async def test_a_backup_that_fails_leaves_nothing(backed: ScriptedYard, tmp_path: Path, last: object) -> None:
    backed.admin["artifacts.Backup"].append(last)
    folder = tmp_path / "backups"
    folder.mkdir()
    async with AsyncClient() as client:
        with pytest.raises(errors.YardError):
            _ = [step async for step in client.backup(folder / "copy")]
    assert list(folder.iterdir()) == []


async def test_a_folder_with_something_in_it_is_never_written_to(backed: ScriptedYard, tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "mine").touch()
    async with AsyncClient() as client:
        with pytest.raises(errors.InvalidArgument, match="not an empty folder"):
            _ = [step async for step in client.backup(tmp_path / "copy")]
    assert [path.name for path in (tmp_path / "copy").iterdir()] == ["mine"]
    assert backed.calls == []


@pytest.mark.parametrize("path", ["../outside", "/tmp/outside", "a/../../outside", ""])
async def test_a_path_that_leads_out_of_the_folder_is_refused(yard: ScriptedYard, tmp_path: Path, path: str) -> None:
    yard.admin["scheduler.Backup"] = [piece(path, b"x")]
    async with AsyncClient() as client:
        with pytest.raises(errors.Defect):
            _ = [step async for step in client.backup(tmp_path / "copies" / "copy")]
    assert not list(tmp_path.rglob("outside"))


async def test_verification_reads_both_keepers_and_passes_findings_on(yard: ScriptedYard) -> None:
    finding = pb.VerifyResponse.Finding(what="pack p1: chunk 3 is damaged", lost="model.pt of digits@2")
    yard.admin["metrics.Verify"] = [pb.VerifyResponse(checked=1, total=1)]
    yard.admin["artifacts.Verify"] = [pb.VerifyResponse(checked=2, total=9, finding=finding)]
    async with AsyncClient() as client:
        steps = [step async for step in client.verify(repair=True)]
    assert [(step.service, step.checked, step.total) for step in steps] == [("metrics", 1, 1), ("artifacts", 2, 9)]
    assert [step.finding for step in steps] == [None, finding]
    assert yard.asked("artifacts.Verify")[0].repair


async def test_usage_is_that_of_all_services(yard: ScriptedYard) -> None:
    for number, service in enumerate(("scheduler", "metrics", "artifacts", "launcher")):
        used = [pb.GetUsageResponse.Usage(what="database", bytes=number)]
        yard.admin[f"{service}.GetUsage"] = [pb.GetUsageResponse(usage=used, free_bytes=7)]
    async with AsyncClient() as client:
        usage = await client.usage()
    assert [(each.service, each.usage[0].bytes, each.free_bytes) for each in usage] == [
        ("scheduler", 0, 7),
        ("metrics", 1, 7),
        ("artifacts", 2, 7),
        ("launcher", 3, 7),
    ]
