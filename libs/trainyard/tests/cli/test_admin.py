"""Commands of whoever runs a yard."""

import json
from pathlib import Path

import pytest
from trainyard_protos.v1 import admin_pb2 as pb

from libs.trainyard.tests.cli.commandline import run, run_on_terminal
from libs.trainyard.tests.client.scripted import ScriptedYard


def finding(**fields: object) -> pb.VerifyResponse:
    return pb.VerifyResponse(checked=1, total=1, finding=pb.VerifyResponse.Finding(**fields))  # type: ignore[arg-type]


async def test_usage_is_a_table_with_the_room_that_is_left(yard: ScriptedYard) -> None:
    for service in ("scheduler", "metrics", "artifacts"):
        used = [pb.GetUsageResponse.Usage(what="chunks", workspace="default", bytes=2048, count=3, unit="chunks")]
        yard.admin[f"{service}.GetUsage"] = [pb.GetUsageResponse(usage=used, free_bytes=1024**3)]
    attempts = {"what": "attempt folders", "workspace": "default", "unit": "attempts"}
    of_job = pb.GetUsageResponse.Usage(**attempts, bytes=5 * 1024**2, count=2, job_id="j", job_name="digits")
    unread = "/home/attempts/a: Permission denied"
    yard.admin["launcher.GetUsage"] = [pb.GetUsageResponse(usage=[of_job], free_bytes=1024**3, unread=[unread])]
    ended = await run("admin", "usage")
    assert ended.lines[0].split() == ["SERVICE", "WHAT", "WORKSPACE", "SIZE", "COUNT"]
    assert ended.lines[1].split() == ["scheduler", "chunks", "default", "2.0", "KiB", "3", "chunks"]
    assert ended.lines[4].split() == [
        "launcher",
        "attempt",
        "folders:",
        "digits",
        "default",
        "5.0",
        "MiB",
        "2",
        "attempts",
    ]
    assert ended.lines[5] == f"not counted (launcher): {unread}"
    assert ended.lines[6].startswith("free: 1.0 GiB (scheduler)")
    (first, *_) = json.loads((await run("admin", "usage", "-o", "json")).out)
    assert (first["service"], first["freeBytes"], first["usage"][0]["what"]) == ("scheduler", 1024**3, "chunks")


async def test_a_whole_yard_verifies_with_exit_code_0(yard: ScriptedYard) -> None:
    yard.admin["metrics.Verify"] = [pb.VerifyResponse(checked=3, total=3)]
    ended = await run("admin", "verify")
    assert (ended.code, ended.lines) == (0, ["everything is as it was written"])


@pytest.mark.parametrize(("repaired", "code"), [(False, 1), (True, 0)])
async def test_damage_is_told_with_what_is_lost_and_what_to_do(yard: ScriptedYard, repaired: bool, code: int) -> None:
    yard.admin["artifacts.Verify"] = [
        finding(what="pack p1: chunk 3 is damaged", hint="store it again", lost="model.pt", repaired=repaired)
    ]
    ended = await run("admin", "verify", *(["--repair"] if repaired else []))
    assert ended.code == code
    assert ended.lines[0] == f"{'repaired' if repaired else 'damaged'} artifacts: pack p1: chunk 3 is damaged"
    assert "  lost: model.pt" in ended.lines
    assert "  next: store it again" in ended.lines
    assert yard.asked("artifacts.Verify")[0].repair is repaired


async def test_maintenance_says_what_it_did(yard: ScriptedYard) -> None:
    yard.admin["metrics.Maintain"] = [pb.MaintainResponse(freed_bytes=1024, done=["compacted 2 runs"])]
    yard.admin["artifacts.Maintain"] = [pb.MaintainResponse()]
    ended = await run("admin", "maintain")
    assert ended.lines[:3] == ["metrics: 1.0 KiB freed", "  compacted 2 runs", "artifacts: 0 B freed"]


async def test_a_backup_says_what_it_wrote_and_how_to_start_it(yard: ScriptedYard, tmp_path: Path) -> None:
    yard.admin["scheduler.Backup"] = [pb.BackupResponse(path="scheduler.db", data=b"x" * 1024)]
    ended = await run_on_terminal("admin", "backup", str(tmp_path / "copy"))
    assert f"{tmp_path}/copy: 1 file, 1.0 KiB" in ended.out
    assert ended.lines[-1] == f"next: TRAINYARD_HOME={tmp_path}/copy yard up"
    assert (tmp_path / "copy" / "scheduler.db").read_bytes() == b"x" * 1024


async def test_a_backup_never_overwrites(yard: ScriptedYard, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ended = await run("admin", "backup", str(tmp_path))
    assert (ended.code, "not an empty folder" in ended.err) == (2, True)
