"""What is stored can be read while no yard is up: commands share a yard that only reads."""

import asyncio
import contextlib
import hashlib
import json
import os
import sqlite3
import subprocess
import sys

import psutil
import pytest
from trainyard.client.reading import reading_client
from trainyard.errors import Conflict
from trainyard.home import READER_FILE, read_endpoint

from tests.conftest import wait_until
from tests.jobs import WAIT_S, document, output, python

TRACKS = """
    import sys
    from trainyard import tracker
    tracker.log({"loss": 0.5}, step=1)
    open("made", "w").write("content")
    print("tracked", flush=True)
    if sys.argv[1:]:
        open(sys.argv[1]).read()
"""
PLAIN = "from trainyard import tracker; tracker.log({'loss': 0.5}, step=1)"


@pytest.fixture(scope="module")
def mode():
    """The yard of one machine alone is started by commands."""
    return "embedded"


@pytest.fixture(scope="module")
def gate(tmp_path_factory):
    path = tmp_path_factory.mktemp("gate") / "gate"
    os.mkfifo(path)
    return path


@pytest.fixture(scope="module")
def left(make_yard_home, gate):
    """A home whose yard was killed: one job has succeeded, one runs, one is queued, and a script's run waits."""
    home = make_yard_home(TRAINYARD_LAUNCHER_CAPACITY_CPU="1")
    try:
        home.up()
        with home.client() as client:
            outputs = [{"path": "made", "artifact": "made"}]
            client.submit(document(python(TRACKS), "done", outputs=outputs)).wait(WAIT_S)
            room = {"cpu": 1, "memory": "256Mi"}
            held = client.submit(document(python(TRACKS, str(gate)), "held", resources=room))
            wait_until(lambda: "tracked" in output(held) and held.values(), "the job to wait")
            client.submit(document(["true"], "waits", resources=room))
        home.kill()
        subprocess.run([sys.executable, "-c", PLAIN], env=home.environ, check=True)
        yield home
    finally:
        home.sweep()


@pytest.fixture
def home_is_ours(left, monkeypatch):
    """The client of this process finds the home."""
    for name in ("TRAINYARD_ENDPOINT", "TRAINYARD_TOKEN", "TRAINYARD_CONTEXT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRAINYARD_HOME", str(left.folder))


def readers(home):
    found = []
    for process in home.processes():
        with contextlib.suppress(psutil.Error):  # it has ended
            if "--read-only" in process.cmdline():
                found.append(process)
    return found


def no_reader(home):
    wait_until(lambda: not readers(home), "the yard that reads to end")
    assert not (home.folder / READER_FILE).exists()


def contents(paths):
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths if path.is_file()}


def stored(home):
    """Everything that services write, by its content."""
    databases = [*home.folder.glob("*.db"), *home.folder.glob("*.db-wal")]
    return contents([*databases, *(home.folder / "runs").rglob("*"), *(home.folder / "packs").rglob("*")])


def undelivered(home):
    """What the script recorded; its own process, which waits for a yard, still adds files to it."""
    return contents((home.folder / "offline").rglob("*"))


def test_every_command_that_reads_answers_and_changes_nothing(left, tmp_path):
    before, recorded = stored(left), undelivered(left)
    shown = {
        ("jobs",): ["done#1", "Completed", "held#1", "running", "waits#1", "NoYard: no yard is running: 'yard up'"],
        ("logs", "-f", "done"): ["tracked"],
        ("metrics", "held"): ["loss", "0.5"],
        ("artifacts", "get", "made@1", str(tmp_path / "made")): ["made@1"],
    }
    for arguments, texts in shown.items():
        ended = left.run(*arguments)
        assert ended.returncode == 0, (arguments, ended.stderr)
        assert [text for text in texts if text not in ended.stdout] == []
    assert (tmp_path / "made" / "made").read_text() == "content"
    no_reader(left)
    assert stored(left) == before
    assert recorded and recorded.items() <= undelivered(left).items()


@pytest.mark.parametrize(
    "arguments", [["cancel", "held"], ["logs", "-f", "held"], ["events", "-f"], ["stacks", "held"]], ids=" ".join
)
def test_what_changes_something_or_waits_for_it_needs_a_yard(left, arguments):
    ended = left.run(*arguments)
    assert ended.returncode == 4
    assert "no yard is running" in ended.stderr
    assert "yard up" in ended.stderr


async def test_commands_share_it_until_the_last_one_ends(left, home_is_ours):
    async with reading_client() as first:
        async with reading_client() as second:
            assert (await first.info()).pid == (await second.info()).pid
        assert (await first.get("done")).number == 1
        assert [process.pid for process in readers(left)] == [(await first.info()).pid]
        with pytest.raises(Conflict) as refused:
            await first.submit(document(["true"], "refused"))
        assert refused.value.reason == "ReadOnlyYard"
        assert read_endpoint(left.folder) is None
    await asyncio.to_thread(no_reader, left)


def test_an_address_elsewhere_or_a_schema_of_another_release_is_not_read(left, make_home):
    elsewhere = left.environ | {"TRAINYARD_ENDPOINT": "127.0.0.1:1"}
    ended = subprocess.run([sys.executable, "-m", "trainyard.cli.main", "jobs"], env=elsewhere, capture_output=True)
    assert ended.returncode == 4
    assert readers(left) == []
    older = make_home()
    for name in ("scheduler", "metrics", "artifacts"):
        with sqlite3.connect(older.folder / f"{name}.db") as database:
            database.execute("CREATE TABLE alembic_version (version_num)")
            database.execute("INSERT INTO alembic_version VALUES ('0001')")
    refused = older.run("jobs")
    assert refused.returncode == 4, refused.stderr
    assert "has schema 0001" in refused.stderr
    assert "yard up" in refused.stderr
    older.assert_nothing_left()


async def test_a_yard_that_starts_meanwhile_does_the_work_beside_the_commands_that_read(left, home_is_ours, gate):
    """The last test of the module: it ends what the others read."""
    async with reading_client() as client:
        reader = (await client.info()).pid
        await asyncio.to_thread(left.up)
        assert (await client.get("done")).number == 1
        async with reading_client() as later:
            assert (await later.info()).pid == read_endpoint(left.folder).pid != reader
    await asyncio.to_thread(no_reader, left)
    assert json.loads((left.folder / "yard.json").read_text())["ephemeral"] is False
    await asyncio.to_thread(gate.write_text, "")
    with left.client() as running:
        for name in ("held", "waits"):
            await asyncio.to_thread(running.job(name).wait, WAIT_S)
    await asyncio.to_thread(left.down)
