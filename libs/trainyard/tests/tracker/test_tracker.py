"""The tracker as a script sees it: it takes what it is given, and never stands in the way."""

import math
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from logs import points, readers, rows, stretches
from trainyard import tracker
from trainyard.tracker import devices, records, writing
from trainyard.tracker import session as sessions
from trainyard.tracker.reading import Progress
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


def test_values_are_recorded_under_their_names_and_step(session, folder):
    session.log({"loss": 0.5, "acc": 1}, step=7)
    assert points(folder) == [("loss", 7, 0.5), ("acc", 7, 1.0)]


def test_one_call_is_one_row(session, folder):
    session.log({"loss": 0.5, "acc": 1}, step=7)
    session.log({"loss": 0.4}, step=8)
    assert [row.number for row in rows(folder)] == [0, 1]


def test_the_log_knows_rank_and_process(session, folder):
    session.log({"loss": 1})
    [reader] = readers(folder)
    assert (reader.header.rank, reader.header.pid) == (5, os.getpid())


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

    session.log({"a": Scalar(), "b": True, "c": "1e3", "d": 10**20})
    assert [value for _, _, value in points(folder)] == [2.5, 1.0, 1000.0, 1e20]


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
        ({"a": 10**400},),
        ({f"name{number:0100d}": 1 for number in range(20_000)},),
    ],
)
def test_nothing_that_is_logged_raises_or_stops_what_follows(session, folder, arguments, capsys):
    session.log(*arguments)
    session.log({"loss": 1}, step=3)
    assert points(folder)[-1] == ("loss", 3, 1.0)


class Hostile:
    """Whatever is asked of it raises an error that cannot be shown either."""

    class Unspeakable(Exception):
        def __str__(self):
            raise ValueError

    def refuse(self, *_):
        raise self.Unspeakable

    __float__ = __int__ = __index__ = __str__ = __repr__ = __bool__ = __len__ = __iter__ = keys = values = refuse


@pytest.mark.parametrize(
    "call",
    [
        lambda it: tracker.log(it),
        lambda it: tracker.log({"a": it}),
        lambda it: tracker.log({it: it}, it),
        lambda it: tracker.log({"a": 1}, it),
        lambda it: tracker.progress(it, it),
        lambda it: tracker.params(it),
        lambda it: tracker.params({"a": it, it: 1}),
        lambda it: tracker.tags(it),
        lambda it: tracker.tags({it: it}),
        lambda it: tracker.note(it),
        lambda it: tracker.init(it, params=it, tags=it),
    ],
)
def test_no_call_raises_whatever_it_is_given(session, folder, monkeypatch, call, capsys):
    monkeypatch.setattr(tracker, "_session", session)
    monkeypatch.setattr(tracker, "log_row", session.log)
    call(Hostile())
    call(None)
    assert "trainyard.tracker: " in capsys.readouterr().err
    session.log({"loss": 1}, step=3)
    assert points(folder)[-1] == ("loss", 3, 1.0)


def test_a_row_of_too_many_values_is_dropped_with_a_warning(session, folder, capsys):
    session.log(dict.fromkeys(map(str, range(10_001)), 1.0), step=0)
    session.log({"loss": 1}, step=1)
    assert points(folder) == [("loss", 1, 1.0)]
    assert "10,001 values at once: a row has at most 10,000" in capsys.readouterr().err


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
    session.facts("params", lambda: {"lr": 0.1, "path": Path("x")})
    session.facts("note", lambda: "first try")
    [stretch] = stretches(readers(folder)[0])
    assert [(said.step, said.total) for said in stretch.progress] == [(3, 10)]
    assert isinstance(stretch.progress[0], Progress)
    assert stretch.facts == [{"params": {"lr": 0.1, "path": "x"}}, {"note": "first try"}]


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


def test_a_signal_handler_may_log_in_the_middle_of_a_call(session, folder, monkeypatch):
    whole = records.SegmentWriter.append
    steps = iter(range(100, 200))

    def interrupted(self, record):
        signal.raise_signal(signal.SIGUSR1)  # the handler runs before the next line
        whole(self, record)

    monkeypatch.setattr(records.SegmentWriter, "append", interrupted)
    before = signal.signal(signal.SIGUSR1, lambda *_: session.log({"signal": 1}, step=next(steps)))
    try:
        session.log({"loss": 1}, step=1)
    except StopIteration:
        pytest.fail("the handler ran without end")
    finally:
        monkeypatch.undo()
        signal.signal(signal.SIGUSR1, before)
    monkeypatch.setenv("TRAINYARD_TRACKER_DIR", str(folder))
    session.log({"loss": 2}, step=2)
    found = points(folder)
    assert ("loss", 1, 1.0) in found and found[-1] == ("loss", 2, 2.0)
    logged = [step for name, step, _ in found if name == "signal"]
    assert logged == list(range(100, 100 + len(logged))) and logged


def test_a_forked_child_writes_a_log_of_its_own(session, folder):
    session.log({"parent": 1})
    pid = os.fork()
    if pid == 0:
        session.log({"child": 2})
        os._exit(0)
    os.waitpid(pid, 0)
    session.log({"parent": 3})
    logs = readers(folder)
    names = sorted([name for group in next(stretches(log)).groups for name in group.names] for log in logs)
    assert names == [["child"], ["parent"]]
    assert len({log.header.writer_id for log in logs}) == 2
    assert [value for name, _, value in points(folder) if name == "parent"] == [1, 3]


def test_a_child_forked_in_the_middle_of_a_call_of_another_thread_logs_too(session, folder):
    with session._lock:
        held = threading.Event()
        threading.Thread(target=lambda: held.set() or session.log({"parent": 1})).start()
        held.wait()
        pid = os.fork()
        if pid == 0:
            session.log({"child": 2})
            os._exit(0)
    os.waitpid(pid, 0)
    assert ("child", 0, 2.0) in points(folder)


def test_after_finish_a_new_log_begins(session, folder):
    session.log({"loss": 1})
    session.finish()
    session.log({"loss": 2})
    assert len(list(folder.iterdir())) == 2


def test_a_job_has_one_run_however_often_it_is_begun(session, folder, capsys):
    session.init("a")
    session.log({"loss": 1}, step=0)
    session.finish()
    session.init("b")
    session.log({"loss": 2}, step=1)
    assert sorted(points(folder)) == [("loss", 0, 1.0), ("loss", 1, 2.0)]
    assert capsys.readouterr().err.count("a job has one run") == 1


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


@pytest.fixture
def session_on_disk(disk, monkeypatch):
    """A session whose log is on a disk of 1 MiB, and that looks for space at every call."""
    monkeypatch.setenv("TRAINYARD_TRACKER_DIR", str(disk.folder / "tracker"))
    monkeypatch.setattr(writing, "RETRY_S", 0.0)
    session = Session()
    yield session
    session.finish()


def test_while_the_disk_is_full_rows_are_dropped_and_counted(session_on_disk, disk, capsys):
    session_on_disk.log({"loss": 1}, step=0)
    disk.fill()
    for step in range(1, 5_000):
        session_on_disk.log({"loss": 1}, step=step)
    disk.empty()
    session_on_disk.log({"loss": 1}, step=5_000)
    found = rows(disk.folder / "tracker")
    assert [row.number for row in found] == list(range(len(found)))  # what was dropped has no number
    kept = len(found) - 1
    assert [row.step for row in found] == [*range(kept), 5_000]
    [reader] = readers(disk.folder / "tracker")
    list(stretches(reader))
    assert reader.dropped() == 5_000 - kept > 0
    assert capsys.readouterr().err.count("the disk is full") == 1


def test_a_disk_that_is_full_from_the_start_is_tried_again(session_on_disk, disk):
    (disk.folder / "tracker").mkdir()
    disk.fill()
    for step in range(10):
        session_on_disk.log({"loss": 1}, step=step)
    assert list((disk.folder / "tracker").iterdir()) == []
    disk.empty()
    session_on_disk.log({"loss": 1}, step=10)
    [reader] = readers(disk.folder / "tracker")
    assert reader.dropped() == 10 and [row.step for row in rows(disk.folder / "tracker")] == [10]


def test_a_full_disk_is_not_asked_for_space_at_every_call(disk, monkeypatch):
    monkeypatch.setenv("TRAINYARD_TRACKER_DIR", str(disk.folder))
    disk.fill()
    monkeypatch.setattr(writing, "RETRY_S", 3600.0)
    session = Session()
    session.log({"loss": 1}, step=0)
    disk.empty()
    session.log({"loss": 1}, step=1)
    assert list(disk.folder.iterdir()) == []


def test_a_run_that_a_full_disk_lets_not_begin_leaves_nothing_behind(disk, monkeypatch):
    monkeypatch.delenv("TRAINYARD_TRACKER_DIR", raising=False)
    monkeypatch.setenv("TRAINYARD_HOME", str(disk.folder))
    monkeypatch.setattr(writing, "RETRY_S", 0.0)
    disk.fill()
    session = Session()
    for step in range(3):
        session.log({"loss": 1}, step=step)
    assert list((disk.folder / "offline").iterdir()) == []


class Tensor:
    """A value on a device, as far as the tracker looks at one: it must never be waited for."""

    is_cuda = True

    def __float__(self):
        pytest.fail("the device was waited for")


@pytest.fixture
def copies(monkeypatch):
    """Stands for the device's queue: what is copied arrives when the test says. The copy itself needs a GPU."""
    arrived: dict[int, float] = {}

    class Event:
        def __init__(self, places):
            self.places = places

        def query(self):
            return all(id(tensor) in arrived for tensor in self.places)

        def synchronize(self):
            for tensor in self.places:
                arrived.setdefault(id(tensor), -1.0)

    class Host(list):
        def tolist(self):
            return [arrived[id(tensor)] for tensor in self]

    def copy(values, places):
        tensors = [values[place] for place in places]
        return places, Host(tensors), Event(tensors)

    monkeypatch.setattr(devices, "_copy", copy)
    monkeypatch.setattr(devices, "_by_device", lambda values: [[i for i, v in enumerate(values) if type(v) is Tensor]])
    return arrived


def test_a_row_that_is_on_a_device_is_written_when_it_is_there_and_in_order(session, folder, copies):
    first, second = Tensor(), Tensor()
    session.log({"loss": first, "lr": 0.1}, step=0)
    session.log({"acc": 1}, step=1)
    session.log({"loss": second, "lr": 0.2}, step=2)
    assert not folder.exists()
    copies[id(second)] = 2.0
    session.log({"acc": 2}, step=3)
    assert not folder.exists()
    copies[id(first)] = 1.0
    session.log({"acc": 3}, step=4)
    assert points(folder) == [
        ("loss", 0, 1.0),
        ("lr", 0, 0.1),
        ("acc", 1, 1.0),
        ("loss", 2, 2.0),
        ("lr", 2, 0.2),
        ("acc", 3, 2.0),
        ("acc", 4, 3.0),
    ]


def test_rows_on_a_device_are_waited_for_at_the_end_alone(session, folder, copies):
    session.log({"loss": Tensor()}, step=0)
    session.finish()
    assert points(folder) == [("loss", 0, -1.0)]


def test_rows_that_wait_are_bounded_in_number(session, folder, copies, monkeypatch):
    monkeypatch.setattr(sessions, "MAX_WAITING", 10)
    kept = [Tensor() for _ in range(25)]
    for tensor in kept:
        session.log({"loss": tensor})
    assert [step for _, step, _ in points(folder)] == list(range(15))
