"""`from trainyard import tracker` in any script, inside of jobs and outside of them."""

import hashlib
import json
import math
import os
import subprocess
import sys
import textwrap

import grpc
import pytest
from trainyard.home import read_endpoint
from trainyard_protos.v1 import metrics_pb2, metrics_pb2_grpc

from tests.conftest import wait_until
from tests.jobs import WAIT_S, document, python

PLAIN = """
    from trainyard import tracker
    tracker.params({"lr": 0.5})
    for step in range(5):
        tracker.log({"loss": 1 / (step + 1)}, step=step)
"""


def run_script(home, code):
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=home.environ, check=True, timeout=WAIT_S)


def plain_runs(home):
    """The points of "loss" of every run that belongs to no job, by name of the run."""
    token = (home.folder / "token").read_text().strip()
    options = {"metadata": [("authorization", f"Bearer {token}")], "timeout": 10}
    with grpc.insecure_channel(read_endpoint(home.folder).endpoint) as channel:
        metrics = metrics_pb2_grpc.MetricsServiceStub(channel)
        runs = [run for run in metrics.ListRuns(metrics_pb2.ListRunsRequest(), **options).runs if not run.job_id]
        answers = []
        for run in runs:
            selector = metrics_pb2.SeriesSelector(run_id=run.id, names=["loss"])
            series = metrics.QuerySeries(metrics_pb2.QuerySeriesRequest(selector=selector), **options).series
            answers.append((json.loads(run.params or "{}"), [(s.name, list(s.step), list(s.value)) for s in series]))
    return answers


EXPECTED = [({"lr": 0.5}, [("loss", [0, 1, 2, 3, 4], [1 / step for step in range(1, 6)])])]


def test_what_a_plain_script_tracks_arrives_in_the_yard(shared_yard):
    run_script(shared_yard, PLAIN)
    wait_until(lambda: plain_runs(shared_yard) == EXPECTED, "the points of the script")


TWO_RUNS = """
    import sys
    from trainyard import tracker
    for name, lr in (("first", 0.5), ("second", 0.25)):
        tracker.init(name, params={"lr": lr})
        for value in range(3):
            tracker.log({"loss": lr * value})
        if "finish" in sys.argv:
            tracker.finish()
        print(name, flush=True)
        sys.stdin.readline()
"""


def loss(lr):
    return ({"lr": lr}, [("loss", [0, 1, 2], [0.0, lr, 2 * lr])])


def test_every_init_of_a_process_begins_a_run_of_its_own(home):
    home.up()
    script = [sys.executable, "-c", textwrap.dedent(TWO_RUNS)]
    with subprocess.Popen(
        script, env=home.environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        process.stdout.readline()
        wait_until(lambda: plain_runs(home) == [loss(0.5)], "the first run")
        process.stdin.write("\n")
        process.stdin.flush()
        process.stdout.readline()
        wait_until(lambda: sorted(map(str, plain_runs(home))) == sorted(map(str, [loss(0.25), loss(0.5)])), "both runs")
        wait_until(lambda: len(list((home.folder / "offline").iterdir())) == 1, "the first run to be let go of")
        process.stdin.close()
    home.down()
    home.assert_nothing_left()


def test_all_ranks_of_a_torchrun_begin_the_same_runs(home):
    """With and without `finish`, and also when a rank records nothing in the first run."""
    environ = home.environ | {"TORCHELASTIC_RUN_ID": "two"}
    quiet = "from trainyard import tracker; tracker.init('first'); tracker.init('second'); tracker.log({'loss': 1})"
    both = textwrap.dedent(TWO_RUNS)
    for rank, arguments in enumerate(([both], [both, "finish"], [quiet])):
        started = {"env": environ | {"RANK": str(rank)}, "input": "\n\n", "text": True, "check": True}
        command = [sys.executable, "-c", *arguments]
        subprocess.run(command, stdout=subprocess.DEVNULL, timeout=WAIT_S, **started)
    runs = [json.loads((run / "run.json").read_text()) for run in (home.folder / "offline").iterdir()]
    assert sorted(run["name"] for run in runs) == ["first", "second"]
    for run in runs:
        logs = list((home.folder / "offline" / run["id"]).glob("*.*.*"))
        assert len(logs) == (2 if run["name"] == "first" else 3)


def test_without_a_yard_what_a_script_tracks_is_kept_and_shipped_later(home, tmp_path):
    """With the code that ran, although the script was changed before the yard began."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(PLAIN))
    ran = hashlib.sha256(script.read_bytes()).hexdigest()
    subprocess.run([sys.executable, script], env=home.environ, check=True, timeout=WAIT_S)
    wait_until(lambda: list((home.folder / "offline").glob("*/context.json")), "the run's context to be kept")
    script.write_text("changed")
    home.up()
    wait_until(lambda: plain_runs(home) == EXPECTED, "the points of the script")
    wait_until(lambda: not any((home.folder / "offline").iterdir()), "the delivered run to be removed")
    with home.client() as client:
        [run] = client.runs()
        assert client.run(run.id).code == {"script": "train.py", "digest": ran}
    home.down()
    home.assert_nothing_left()


def test_what_a_script_tracks_between_two_yards_waits_for_the_second(home):
    home.up()
    home.down()
    run_script(home, PLAIN)
    home.assert_nothing_left()  # the script's shipper gave up
    home.up()
    wait_until(lambda: plain_runs(home) == EXPECTED, "the points of the script")
    home.down()
    home.assert_nothing_left()


def test_values_that_are_no_numbers_are_kept(client):
    code = """
        from trainyard import tracker
        for step, value in enumerate([1.0, float("nan"), float("inf"), float("-inf")]):
            tracker.log({"loss": value}, step=step)
    """
    job = client.submit(document(python(code)))
    job.wait(WAIT_S)
    values = list(job.metrics("loss")["loss"].value)
    assert values[0] == 1.0 and math.isnan(values[1]) and values[2:] == [math.inf, -math.inf]


def test_forked_children_track_beside_their_parent(client):
    code = """
        import os
        from trainyard import tracker
        tracker.log({"parent": 1.0}, step=1)
        if os.fork() == 0:
            tracker.log({"child": 2.0}, step=1)
            os._exit(0)
        os.wait()
        tracker.log({"parent": 3.0}, step=2)
    """
    job = client.submit(document(python(code)))
    job.wait(WAIT_S)
    assert job.values() == {"parent": 3.0, "child": 2.0}


def test_what_was_tracked_can_be_asked_for_while_the_job_runs(client, tmp_path):
    code = """
        import sys
        from trainyard import tracker
        tracker.log({"loss": 0.5}, step=1)
        open(sys.argv[1]).read()
    """
    os.mkfifo(tmp_path / "gate")
    job = client.submit(document(python(code, str(tmp_path / "gate"))))
    wait_until(lambda: job.values() == {"loss": 0.5}, "the value of the running job")
    (tmp_path / "gate").write_text("")
    job.wait(WAIT_S)


@pytest.mark.parametrize("max_points", [10, 100])
def test_fewer_points_keep_the_least_and_the_greatest(client, max_points):
    code = """
        from trainyard import tracker
        for step in range(5000):
            tracker.log({"spiky": {1234: 99.0, 4321: -99.0}.get(step, 0.0)}, step=step)
    """
    job = client.submit(document(python(code)))
    job.wait(WAIT_S)
    series = job.metrics("spiky", max_points=max_points)["spiky"]
    assert len(series.value) <= max_points
    assert (min(series.value), max(series.value)) == (-99.0, 99.0)
