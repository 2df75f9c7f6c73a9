import queue
import threading

import pytest
from celery.exceptions import WorkerShutdown
from servicekit.celery import Worker, celery_app, register
from servicekit.messages import start_queue, stop_queue

from scripts.testbed.patience import PATIENCE_S


@pytest.fixture(params=["inprocess", "redis"])
def app(request):
    """An application within this process, and one over Redis."""
    return celery_app() if request.param == "inprocess" else celery_app(request.getfixturevalue("redis_url"))


@pytest.fixture
def workers():
    running = []
    yield running.append
    for worker in running:
        worker.stop()


def test_a_stop_does_not_wait_behind_starts(app, workers):
    blocked = threading.Event()
    seen: queue.Queue[str] = queue.Queue()

    def block(attempt_id):
        blocked.wait()

    register(app, "trainyard.launch", block)
    register(app, "trainyard.stop", seen.put)
    for name in (start_queue("alpha"), stop_queue("alpha")):
        worker = Worker(app, [name], concurrency=2)
        worker.start()
        workers(worker)
    for number in range(50):
        app.send_task("trainyard.launch", args=[str(number)], queue=start_queue("alpha"))
    app.send_task("trainyard.stop", args=["x"], queue=stop_queue("alpha"))
    assert seen.get(timeout=PATIENCE_S) == "x"
    blocked.set()


def test_a_worker_takes_only_its_own_queues(app, workers):
    seen: queue.Queue[str] = queue.Queue()

    register(app, "trainyard.launch", seen.put)
    worker = Worker(app, [start_queue("beta")], concurrency=1)
    worker.start()
    workers(worker)
    app.send_task("trainyard.launch", args=["other"], queue=start_queue("gamma"))
    app.send_task("trainyard.launch", args=["own"], queue=start_queue("beta"))
    assert seen.get(timeout=PATIENCE_S) == "own"
    assert seen.empty()


def test_two_workers_of_one_process_do_not_read_each_others_messages(app, workers):
    seen: queue.Queue[tuple[str, str]] = queue.Queue()

    def start(number):
        seen.put(("start", number))

    def stop(number):
        seen.put(("stop", number))

    register(app, "trainyard.launch", start)
    register(app, "trainyard.stop", stop)
    for name in (start_queue("delta"), stop_queue("delta")):
        worker = Worker(app, [name], concurrency=2)
        worker.start()
        workers(worker)
        # Of the whole process there is one such loop, in which mixed reads show only now and then.
        assert not worker._controller.use_eventloop
    sent = set()
    for number in map(str, range(100)):
        app.send_task("trainyard.launch", args=[number], queue=start_queue("delta"))
        app.send_task("trainyard.stop", args=[number], queue=stop_queue("delta"))
        sent |= {("start", number), ("stop", number)}
    assert {seen.get(timeout=PATIENCE_S) for _ in sent} == sent


def test_a_worker_that_ended_by_itself_starts_again(app, workers):
    seen: queue.Queue[str] = queue.Queue()
    register(app, "trainyard.launch", seen.put)
    worker = Worker(app, [start_queue("epsilon")], concurrency=1)
    worker.start()
    workers(worker)

    def give_up():  # as Celery does after an error that it calls unrecoverable
        ended.set()
        raise WorkerShutdown(1)

    ended = threading.Event()
    worker._controller.consumer.call_soon(give_up)
    assert ended.wait(PATIENCE_S)
    app.send_task("trainyard.launch", args=["x"], queue=start_queue("epsilon"))
    assert seen.get(timeout=PATIENCE_S) == "x"


def test_a_worker_that_waits_for_messages_ends_when_it_is_stopped(app):
    worker = Worker(app, [start_queue("zeta")], concurrency=1)
    worker.start()
    worker.stop(PATIENCE_S)
    assert not worker._thread.is_alive()


@pytest.mark.parametrize("loss", ["kill", "pause"])
def test_a_worker_whose_broker_is_away_ends_when_it_is_stopped(redis_server, redis_url, loss):
    worker = Worker(celery_app(redis_url), [start_queue("eta")], concurrency=1)
    worker.start()
    getattr(redis_server, loss)()
    worker.stop(PATIENCE_S)
    assert not worker._thread.is_alive()


def test_a_worker_that_is_stopped_before_it_reached_its_broker_gives_up(redis_server, redis_url):
    redis_server.kill()
    worker = Worker(celery_app(redis_url), [start_queue("theta")], concurrency=1)
    starting = threading.Timer(0, worker.stop)
    starting.start()
    with pytest.raises(RuntimeError, match="stopped before it had reached"):
        worker.start()
    starting.join()
