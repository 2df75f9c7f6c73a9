import queue
import threading

import pytest
from servicekit.celery import Worker, celery_app, register, start_queue, stop_queue


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
        blocked.wait(30)

    register(app, "trainyard.launch", block)
    register(app, "trainyard.stop", seen.put)
    for name in (start_queue("alpha"), stop_queue("alpha")):
        worker = Worker(app, [name], concurrency=2)
        worker.start()
        workers(worker)
    for number in range(50):
        app.send_task("trainyard.launch", args=[str(number)], queue=start_queue("alpha"))
    app.send_task("trainyard.stop", args=["x"], queue=stop_queue("alpha"))
    assert seen.get(timeout=20) == "x"
    blocked.set()


def test_a_worker_takes_only_its_own_queues(app, workers):
    seen: queue.Queue[str] = queue.Queue()

    register(app, "trainyard.launch", seen.put)
    worker = Worker(app, [start_queue("beta")], concurrency=1)
    worker.start()
    workers(worker)
    app.send_task("trainyard.launch", args=["other"], queue=start_queue("gamma"))
    app.send_task("trainyard.launch", args=["own"], queue=start_queue("beta"))
    assert seen.get(timeout=20) == "own"
    assert seen.empty()
