"""The live line: name, state, percent and time left are shown at any width."""

import os
import pty
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from trainyard.cli import live_line, terminal
from trainyard.cli.live_line import SEPARATOR, LiveLine, fit, shorten
from trainyard.cli.run.live import JobLine
from trainyard_protos.v1 import common_pb2, scheduler_pb2

from libs.trainyard.tests.client.scripted import event

STATES = ("queued", "starting", "running", "stopping", "finalizing")
NARROWEST = 20
LINES = st.builds(
    LiveLine,
    name=st.text(min_size=1, max_size=100).filter(lambda text: terminal.plain(text) == text and cell_len(text) > 0),
    state=st.sampled_from(STATES),
    done=st.floats(0, 1.5),
    seconds_left=st.floats(0, 40 * 86400),
    others=st.lists(st.text(max_size=40), max_size=4),
)


@given(LINES, st.integers(1, 250))
def test_a_line_is_never_wider_than_the_terminal(line: LiveLine, width: int) -> None:
    assert cell_len(SEPARATOR.join(fit(line, width))) <= width


@given(LINES, st.integers(NARROWEST, 250))
def test_the_first_four_parts_are_shown_at_any_width(line: LiveLine, width: int) -> None:
    name, state, percent, left, *_ = fit(line, width)
    assert name == line.name or ("…" in name and name[0] == line.name[0]) or cell_len(line.name[0]) > 1
    assert state == line.state or state.endswith("…")
    assert state[:3] == line.state[:3]
    assert percent == f"{min(int((line.done or 0) * 100), 100)}%"
    assert left[0].isdigit()
    assert left.removesuffix(" left")[-1] in "smnhd"


@given(LINES, st.integers(1, 250))
def test_other_parts_are_dropped_before_the_first_four_are_shortened(line: LiveLine, width: int) -> None:
    parts = fit(line, width)
    if len(parts) > 4:
        assert parts[:2] == [line.name, line.state]
        assert parts[3].endswith(" left")


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (200, "resnet-large-run-7 running 42% 2 h 10 min left ━━━━━━━━╌╌╌╌╌╌╌╌╌╌╌╌ step 42/100 · loss 0.25"),
        (78, "resnet-large-run-7 running 42% 2 h 10 min left ━━━━━━━━╌╌╌╌╌╌╌╌╌╌╌╌ step 42/1…"),
        (60, "resnet-large-run-7 running 42% 2 h 10 min left step 42/100"),
        (54, "resnet-large-run-7 running 42% 2 h 10 min left"),
        (45, "resnet-larg…run-7 running 42% 2 h 10 min left"),
        (40, "resnet-large-run-7 running 42% 2h10m"),
        (26, "resne…-7 running 42% 2h10m"),
        (20, "res…7 running 42% 2h"),
        (16, "re… runn… 42% 2h"),
    ],
)
def test_what_makes_room_in_which_order(width: int, expected: str) -> None:
    progress = common_pb2.Progress(
        step=42, total_steps=100, updated_ns=1, seconds_left=7800.0, metrics={"loss": 0.25, "system/cpu": 1.0}
    )
    job = JobLine("resnet-large-run-7", "running")
    job.progressed(progress)
    line = job.line()
    assert SEPARATOR.join(fit(line, width)) == expected


@pytest.mark.parametrize("cells", range(12))
def test_names_of_wide_characters_are_cut_by_the_room_they_take(cells: int) -> None:
    assert cell_len(shorten("訓練ジョブ七", cells)) <= cells
    assert shorten("訓練ジョブ七", 12) == "訓練ジョブ七"
    assert shorten("訓練ジョブ七", 9) == "訓練ジ…七"


def shown(job: JobLine, width: int = 80) -> str:
    return SEPARATOR.join(fit(job.line(), width))


def test_a_queued_job_says_why_it_waits() -> None:
    job = JobLine("digits", "queued")
    job.waits(scheduler_pb2.Pending(reason="WaitingForCapacity", message="2 GPU are in use"))
    assert shown(job, 40) == "digits queued WaitingForCapacity: 2 GPU…"
    assert shown(job, 18) == "digits queued"
    job.happened(event(1, "Running", "running"))
    assert shown(job) == "digits running"


def test_a_job_that_was_requeued_says_why_and_forgets_the_progress_of_its_attempt() -> None:
    job = JobLine("digits", "running")
    job.progressed(common_pb2.Progress(step=7, total_steps=10, updated_ns=1))
    job.happened(event(1, "Requeued", "queued", reason="Evicted", message="Evicted: a drain; free retry 1 of 10"))
    assert shown(job) == "digits queued Evicted: a drain; free retry 1 of 10"


def test_a_job_without_a_total_shows_its_step() -> None:
    job = JobLine("digits", "running")
    job.progressed(common_pb2.Progress(step=7, updated_ns=1))
    assert shown(job) == "digits running step 7"


def test_a_bar_is_as_full_as_the_share_that_is_done() -> None:
    assert live_line.bar(0.5) == "━" * 10 + "╌" * 10
    assert live_line.bar(3.0) == "━" * 20


def test_a_line_of_progress_is_cut_to_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 10, 0, 0))
    with os.fdopen(theirs, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        terminal.progress("artifacts: 12 of 40 checked")
        monkeypatch.undo()
        assert os.read(ours, 1000) == b"\r\x1b[Kartifacts"
    os.close(ours)
