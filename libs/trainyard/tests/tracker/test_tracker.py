"""The tracker as a script sees it: it takes what it is given, and never stands in the way."""

import math
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from trainyard.tracker.records import Facts, LogReader, Points, ProgressMade
from trainyard.tracker.session import Session


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINYARD_TRACKER_DIR", str(tmp_path / "tracker"))
    monkeypatch.setenv("RANK", "5")
    return tmp_path / "tracker"


@pytest.fixture
def session(folder):
    session = Session()
    yield session
    session.finish()


def records(folder: Path) -> list:
    found = []
    for path in sorted(folder.iterdir()):
        reader = LogReader(path)
        while new := list(reader.read()):
            found += new
    return found


def points(folder: Path) -> list[tuple[str, int, float]]:
    return [
        (name, record.step, value)
        for record in records(folder)
        if isinstance(record, Points)
        for name, value in zip(record.names, record.values, strict=True)
    ]


def test_values_are_recorded_under_their_names_and_step(session, folder):
    session.log({"loss": 0.5, "acc": 1}, step=7)
    assert points(folder) == [("loss", 7, 0.5), ("acc", 7, 1.0)]


def test_the_log_knows_the_rank_of_its_process(session, folder):
    session.log({"loss": 1})
    [path] = folder.iterdir()
    assert LogReader(path).rank == 5


def test_without_a_step_the_next_one_is_taken(session, folder):
    session.log({"loss": 1})
    session.log({"loss": 2}, step=10)
    session.log({"loss": 3})
    assert [step for _, step, _ in points(folder)] == [0, 10, 11]


def test_nan_and_infinities_are_kept(session, folder):
    session.log({"a": math.nan, "b": math.inf, "c": -math.inf})
    values = [value for _, _, value in points(folder)]
    assert math.isnan(values[0])
    assert values[1:] == [math.inf, -math.inf]


def test_anything_float_takes_is_a_value(session, folder):
    class Scalar:
        def __float__(self):
            return 2.5

    session.log({"a": Scalar(), "b": True, "c": "1e3"})
    assert [value for _, _, value in points(folder)] == [2.5, 1.0, 1000.0]


def test_a_bad_value_is_dropped_with_one_warning_and_the_others_kept(session, folder, capsys):
    for _ in range(3):
        session.log({"good": 1, "bad": object()}, step=1)
    assert [name for name, _, _ in points(folder)] == ["good"] * 3
    assert capsys.readouterr().err.count("the value of 'bad' was dropped") <= 3


@pytest.mark.parametrize(
    "arguments",
    [
        (None,),
        (3,),
        ({},),
        ({"loss": "x"},),
        ({1: 2},),
        ({"": 1},),
        ({"x" * 500: 1},),
        ({"a": 1}, "x"),
        ({"a": 1}, 2**70),
    ],
)
def test_nothing_that_is_logged_raises(session, arguments, capsys):
    session.log(*arguments)


def test_a_bad_value_is_warned_of_once(session, capsys):
    for _ in range(3):
        session.log({"bad": None}, step=1)
    assert capsys.readouterr().err.count("the value of 'bad' was dropped") == 1


def test_a_folder_that_cannot_be_written_costs_the_numbers_not_the_training(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRAINYARD_TRACKER_DIR", str(tmp_path / "file" / "below"))
    session = Session()
    for _ in range(100):
        session.log({"loss": 1})
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) <= 2
    assert "nothing is recorded" in warnings[0]


def test_progress_params_tags_and_notes_are_recorded(session, folder):
    session.progress(3, 10)
    session.facts("params", {"lr": 0.1, "path": Path("x")})
    session.facts("note", "first try")
    progress, params, note = records(folder)
    assert isinstance(progress, ProgressMade)
    assert (progress.step, progress.total) == (3, 10)
    assert (params, note) == (Facts({"params": {"lr": 0.1, "path": "x"}}), Facts({"note": "first try"}))


def test_threads_lose_nothing_and_mix_nothing(session, folder):
    def work(thread: int) -> None:
        for step in range(500):
            session.log({f"thread{thread}/a": step, f"thread{thread}/b": -step}, step=step)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = points(folder)
    for number in range(8):
        assert [value for name, _, value in found if name == f"thread{number}/a"] == list(range(500))
        assert [value for name, _, value in found if name == f"thread{number}/b"] == [-step for step in range(500)]


def test_a_forked_child_writes_a_log_of_its_own(session, folder):
    session.log({"parent": 1})
    pid = os.fork()
    if pid == 0:
        session.log({"child": 2})
        os._exit(0)
    os.waitpid(pid, 0)
    session.log({"parent": 3})
    logs = [LogReader(path) for path in folder.iterdir()]
    names = sorted([name for record in log.read() for name in record.names] for log in logs)
    assert names == [["child"], ["parent", "parent"]]
    assert len({log.writer_id for log in logs}) == 2


def test_after_finish_a_new_log_begins(session, folder):
    session.log({"loss": 1})
    session.finish()
    session.log({"loss": 2})
    assert len(list(folder.iterdir())) == 2


def test_the_tracker_imports_the_standard_library_alone(tmp_path):
    code = (
        "import sys; from trainyard import tracker; tracker.log({'a': 1});"
        "print([name for name in sys.modules if name.partition('.')[0] not in sys.stdlib_module_names"
        " and not name.startswith(('trainyard', '__')) and name not in before])"
    )
    result = subprocess.run(
        [sys.executable, "-c", f"import sys; before = set(sys.modules); {code}"],
        env={**os.environ, "TRAINYARD_TRACKER_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert result.stdout.strip() == "[]", result.stdout + result.stderr
