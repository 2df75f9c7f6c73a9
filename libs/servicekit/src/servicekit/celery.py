"""Celery as every service uses it: messages are wake-ups that carry ids and fences, state is in SQL.

Without a Redis address the transport is in memory, in this process; the code above it is the same. The worker runs in a
thread: prefork and gRPC do not mix.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kombu import Queue

from celery import Celery

if TYPE_CHECKING:
    from celery.worker import WorkController

LAUNCH = "trainyard.launch"
STOP = "trainyard.stop"
FORGET = "trainyard.forget"


def start_queue(pool: str) -> str:
    """Where attempts to start wait for the launchers of a pool."""
    return f"pool.{pool}.start"


def stop_queue(pool: str) -> str:
    """Where stops wait: a queue of their own, so that a stop never waits behind starts."""
    return f"pool.{pool}.stop"


def celery_app(broker_url: str = "memory://") -> Celery:
    """An application on a broker: `memory://` within one process, `redis://...` between processes."""
    app = Celery("trainyard", broker=broker_url, set_as_current=False)
    app.conf.update(
        task_acks_late=True,
        task_ignore_result=True,
        task_store_eager_result=False,
        worker_prefetch_multiplier=1,
        worker_pool="threads",
        worker_redirect_stdouts=False,
        worker_hijack_root_logger=False,
        worker_send_task_events=False,
        worker_enable_remote_control=False,
        broker_connection_retry_on_startup=True,
        broker_transport_options={"visibility_timeout": 60, "polling_interval": 0.01},
        task_serializer="json",
        accept_content=["json"],
        enable_utc=True,
    )
    return app


class Worker:
    """Consumes some queues in threads of this process until stopped.

    Args:
        app: the application with its tasks.
        queues: names of the queues.
        concurrency: how many tasks at once.
    """

    def __init__(self, app: Celery, queues: Sequence[str], concurrency: int) -> None:
        self._app = app
        self._queues = [Queue(name, routing_key=name) for name in queues]
        self._concurrency = concurrency
        self._controller: WorkController | None = None
        self._ready = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begins to consume; returns when the worker is ready."""
        name = "worker-" + "-".join(queue.name for queue in self._queues)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        if not self._ready.wait(timeout=30):
            raise RuntimeError(f"the Celery worker {name} did not start: can it reach the broker?")

    def _run(self) -> None:
        self._controller = self._app.WorkController(
            app=self._app,
            queues=self._queues,
            concurrency=self._concurrency,
            pool_cls="threads",
            hostname="-".join(queue.name for queue in self._queues),
            ready_callback=lambda _consumer: self._ready.set(),
            without_heartbeat=True,
            without_mingle=True,
            without_gossip=True,
        )
        self._controller.start()

    def stop(self, timeout_s: float = 10) -> None:
        """Takes no more tasks and lets the running ones end."""
        if self._controller is not None:
            from celery.worker import state

            state.should_stop = 0
            try:
                self._controller.stop()
            finally:
                state.should_stop = None
        if self._thread is not None:
            self._thread.join(timeout_s)
