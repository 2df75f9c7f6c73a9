"""`yard run` on a terminal, through a pseudo-terminal."""

import asyncio
import fcntl
import io
import os
import pty
import re
import signal
import struct
import sys
import termios
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from ruamel.yaml import YAML
from trainyard.cli import output, tables, terminal, transfer_view
from trainyard_protos.v1 import common_pb2, launcher_pb2

from libs.trainyard.tests.client.scripted import JOB_ID, ScriptedYard, document, event, job, line, lines, started
from scripts.testbed.patience import PATIENCE_S

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A command on a pseudo-terminal: what it showed, and a keyboard."""

    def __init__(self, process: asyncio.subprocess.Process, descriptor: int) -> None:
        self.process = process
        self.shown = ""
        self._descriptor = descriptor
        self._changed = asyncio.Event()
        asyncio.get_running_loop().add_reader(descriptor, self._read)

    def _read(self) -> None:
        try:
            self.shown += os.read(self._descriptor, 65536).decode(errors="replace")
        except OSError:  # the other side is closed
            self.close()
        self._changed.set()

    @property
    def text(self) -> str:
        """What was shown, without colours and cursor movements."""
        return ESCAPES.sub("", self.shown)

    async def until(self, text: str) -> None:
        """Waits until a text is shown; fails with what was shown instead."""
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                while text not in self.text:
                    self._changed.clear()
                    await self._changed.wait()
        assert text in self.text

    def type(self, keys: str) -> None:
        os.write(self._descriptor, keys.encode())

    def resize(self, columns: int) -> None:
        resize(self._descriptor, columns)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)


def resize(descriptor: int, columns: int) -> None:
    """Sets the width of a terminal."""
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))


@asynccontextmanager
async def running(
    yard: ScriptedYard,
    tmp_path: Path,
    end: asyncio.Event,
    text: str = "hello",
    metric: str = "loss",
    note: str = "",
    name: str = "digits",
) -> AsyncIterator[Terminal]:
    """A run on a terminal whose job runs until the event; it writes `text`, tracks `metric` and has an event."""
    file = tmp_path / "job.json"
    file.write_text(document())
    progress = common_pb2.Progress(
        step=120, total_steps=600, updated_ns=1, seconds_left=42.0, metrics={metric: 0.25, "system/cpu": 1.0}
    )
    yard.job = job("running", name=name)
    notes = [event(2, "Note", "running", message=note)] if note else []
    yard.events = [[event(1, "Running", "running"), *notes, end, event(3, "Succeeded", "succeeded")]]
    yard.live = [[started(1), lines(line(0, text)), launcher_pb2.FollowEvent(progress=progress), end]]
    ours, theirs = pty.openpty()
    resize(theirs, 160)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "trainyard.cli.main", "run", str(file)),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**{k: v for k, v in os.environ.items() if k != "COLUMNS"}, "TERM": "xterm-256color"},
        preexec_fn=lambda: (os.setsid(), fcntl.ioctl(0, termios.TIOCSCTTY, 0)),
    )
    os.close(theirs)
    terminal = Terminal(process, ours)
    try:
        await terminal.until("hello")
        yield terminal
    finally:
        end.set()
        if process.returncode is None:
            process.kill()
        await process.wait()
        terminal.close()
        os.close(ours)


async def test_progress_is_shown_and_gone_at_the_end(yard: ScriptedYard, tmp_path: Path) -> None:
    end = asyncio.Event()
    async with running(yard, tmp_path, end) as terminal:
        await terminal.until(f"digits running 20% 42 s left {'━' * 4}{'╌' * 16} step 120/600 · loss 0.25 ")
        yard.job = job("succeeded")
        end.set()
        await terminal.until("digits succeeded after 12 s")
        assert await terminal.process.wait() == 0
    assert "system/cpu" not in terminal.text


async def test_name_state_percent_and_time_left_are_shown_at_any_width(yard: ScriptedYard, tmp_path: Path) -> None:
    end = asyncio.Event()
    name = "digits-with-a-name-that-is-longer-than-the-terminal-" + "x" * 80 + "-seed-7"
    async with running(yard, tmp_path, end, name=name) as terminal:
        terminal.resize(200)
        await terminal.until("x-seed-7 running 20% 42 s left ━")
        terminal.resize(40)
        await terminal.until("digits-with-…eed-7 running 20% 42 s left")
        terminal.resize(20)
        await terminal.until("di…7 running 20% 42s")
        end.set()


async def test_names_lines_and_messages_are_shown_as_written_and_control_nothing(
    yard: ScriptedYard, tmp_path: Path
) -> None:
    end = asyncio.Event()
    attack = "\x1b]0;title\x07\x9b2J\x1b]52;c;aGk=\x07"
    metric, note = f"acc[/val][red]{attack}", f"[/bold] no [link=x] {attack}"
    async with running(yard, tmp_path, end, text=f"hello [/b] {attack}", metric=metric, note=note) as terminal:
        await terminal.until("acc[/val][red]]0;title2J]52;c;aGk= 0.25")
        await terminal.until("yard: note ([/bold] no [link=x] ]0;title2J]52;c;aGk=)")
        await terminal.until("hello [/b] ]0;title2J")
        yard.job = job("succeeded")
        end.set()
        await terminal.until("digits succeeded after 12 s")
        assert await terminal.process.wait() == 0
    assert not re.search("\x07|\x9b|\x1b]", terminal.shown)


async def test_the_first_interrupt_detaches(yard: ScriptedYard, tmp_path: Path) -> None:
    async with running(yard, tmp_path, asyncio.Event()) as terminal:
        terminal.type("\x03")
        await terminal.until("Ctrl-C again to cancel it")
        await terminal.until("next: yard logs -f")
        assert await asyncio.wait_for(terminal.process.wait(), 30) == 130
    assert "detached: digits" in terminal.text
    assert yard.asked("CancelJob") == []


async def test_the_second_interrupt_offers_to_cancel(yard: ScriptedYard, tmp_path: Path) -> None:
    end = asyncio.Event()
    async with running(yard, tmp_path, end) as terminal:
        terminal.type("\x03")
        await terminal.until("Ctrl-C again to cancel it")
        terminal.type("\x03")
        await terminal.until("cancel digits? [y/N]")
        yard.job = job("cancelled")
        terminal.type("y\n")
        assert await asyncio.wait_for(terminal.process.wait(), 30) == 7
    assert [request.id for request in yard.asked("CancelJob")] == [JOB_ID]


async def test_anything_but_yes_leaves_the_job_alone(yard: ScriptedYard, tmp_path: Path) -> None:
    async with running(yard, tmp_path, asyncio.Event()) as terminal:
        terminal.type("\x03")
        await terminal.until("Ctrl-C again to cancel it")
        terminal.process.send_signal(signal.SIGINT)
        await terminal.until("cancel digits? [y/N]")
        terminal.type("\n")
        assert await asyncio.wait_for(terminal.process.wait(), 30) == 130
    assert yard.asked("CancelJob") == []


@pytest.mark.parametrize("write", [terminal.say, terminal.complain])
def test_what_is_written_cannot_drive_the_terminal_of_its_reader(write, capsys):
    write("\x1b[31mred\x1b[0m \x1b[2J\x1b]0;title\x07 \u202egpj.exe\x9b2J\r\nnext\tline")
    out, err = capsys.readouterr()
    assert out + err == "\x1b[31mred\x1b[0m [2J]0;title gpj.exe2J\nnext\tline\n"


def test_a_colour_ends_with_its_line(capsys):
    terminal.say("\x1b[8mhidden\nshown")
    assert capsys.readouterr().out == "\x1b[8mhidden\x1b[0m\nshown\n"


def test_a_name_in_a_table_breaks_no_row_and_takes_the_width_it_shows(capsys):
    tables.show(["NAME", "VALUE"], [["a\nb\x1b]0;\x07", "1"], ["abcdef", "2"]])
    assert capsys.readouterr().out.splitlines() == ["NAME    VALUE", "a b]0;  1", "abcdef  2"]


def test_the_bar_of_a_transfer_shows_a_name_as_it_is_written(monkeypatch):
    written = io.StringIO()
    monkeypatch.setattr(transfer_view, "is_terminal", lambda stream: True)
    monkeypatch.setattr(sys, "stderr", written)
    monkeypatch.setenv("FORCE_COLOR", "1")
    with transfer_view.progress("a[/b]\x1b]0;x\x07", "storing", 10) as done:
        done(10)
    assert "a[/b]]0;x storing 100%" in ESCAPES.sub("", written.getvalue())
    assert "\x07" not in written.getvalue()


@pytest.mark.parametrize("form", [output.Format.JSON, output.Format.YAML])
def test_what_is_written_for_programs_controls_no_terminal(form, capsys):
    text = "\x1b]0;x\x07 \x9b2J \u202etxt é"
    output.write({"name": text}, form)
    shown = capsys.readouterr().out
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f]", shown)
    assert YAML(typ="safe").load(shown) == {"name": text}
