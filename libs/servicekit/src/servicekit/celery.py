"""Celery as every service uses it: messages are wake-ups that carry ids and fences, state is in SQL.

Without a Redis address the transport is in memory, in this process; the code above it is the same. The worker runs in a
thread: prefork and gRPC do not mix.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from celery import Celery

from servicekit import inprocess

if TYPE_CHECKING:
    from celery.worker import WorkController
    from celery.worker.consumer import Consumer

logger = logging.getLogger(__name__)

_START_LIMIT_S = 120.0  # for the broker to be reached
_RESTART_S = 1.0  # before a worker that ended by itself starts again
# Between tries to reach a broker that is away: half a second, and half a second more each time, to this.
_RECONNECT_STEP_S = 0.5
_RECONNECT_MOST_S = 2.0

# Without them a Redis that hangs would hold a sender for ever. A blocking pop lasts a second.
_TRANSPORT = {
    "visibility_timeout": 60,
    "socket_timeout": 10,
    "socket_connect_timeout": 5,
    "socket_keepalive": True,
    "health_check_interval": 10,
}


def celery_app(broker_url: str = f"{inprocess.SCHEME}://localhost/") -> Celery:
    """An application on a broker: `inprocess://` within one process, `redis://...` between processes."""
    app = Celery("trainyard", broker=broker_url, set_as_current=False)
    app.conf.update(
        task_acks_late=True,
        task_ignore_result=True,
        task_store_eager_result=False,
        # A worker looks for room again only when a message comes, or after a second: it takes some ahead.
        worker_prefetch_multiplier=32,
        worker_pool="threads",
        worker_redirect_stdouts=False,
        worker_hijack_root_logger=False,
        worker_send_task_events=False,
        worker_enable_remote_control=False,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        broker_transport_options=_TRANSPORT,
        task_serializer="json",
        accept_content=["json"],
        enable_utc=True,
    )
    return app


def register(app: Celery, name: str, run: Callable[..., None]) -> None:
    """Makes a function the task of that name, on this application alone; Celery shares tasks by default."""
    app.task(name=name, shared=False)(run)


class Worker:
    """Consumes some queues in threads of this process until stopped.

    Args:
        app: the application with its tasks.
        queues: names of the queues.
        concurrency: how many tasks at once.
    """

    def __init__(self, app: Celery, queues: Sequence[str], concurrency: int) -> None:
        self._app = _with_tasks_of(app)
        self._queues = list(queues)
        self._concurrency = concurrency
        self._controller: WorkController | None = None
        self._started: Future[None] = Future()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="worker-" + "-".join(queues), daemon=True)

    def start(self) -> None:
        """Begins to consume; returns when the worker is ready.

        Raises:
            TimeoutError: the broker was not reached within 120 s.
            RuntimeError: it was stopped meanwhile. Or whatever made the worker fail.
        """
        # Celery's pool threads look tasks up in the process's default application; all of ours have the same tasks.
        self._app.set_default()
        self._thread.start()
        self._started.result(timeout=_START_LIMIT_S)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._controller = self._make_controller()
                self._controller.start()
            except Exception as error:
                if not self._started.done():
                    self._started.set_exception(error)
                    return
                logger.exception("a worker failed")
            # Celery gives up on what it calls unrecoverable; nobody else would take this queue's messages.
            if not self._stopping.wait(_RESTART_S):
                logger.error("a worker ended by itself and starts again", extra={"queues": self._queues})
        if not self._started.done():
            self._started.set_exception(RuntimeError("the worker was stopped before it had reached the broker"))

    def _make_controller(self) -> WorkController:
        return self._app.WorkController(
            app=self._app,
            queues=self._queues,
            concurrency=self._concurrency,
            pool_cls="threads",
            hostname=self._thread.name,
            # Celery's event loop is one for the whole process: its workers would read each other's sockets.
            use_eventloop=False,
            consumer_cls=_consumer(self._stopping),
            without_heartbeat=True,
            without_mingle=True,
            without_gossip=True,
            ready_callback=self._on_ready,
        )

    def _on_ready(self, _consumer: object) -> None:
        if not self._started.done():
            self._started.set_result(None)

    def stop(self, timeout_s: float = 10) -> None:
        """Takes no more tasks and lets the running ones end, for so long at most."""
        self._stopping.set()
        inprocess.bell.ring()
        if self._thread.is_alive():
            self._thread.join(timeout_s)


def _consumer(stopping: threading.Event) -> type[Consumer]:
    """A consumer that ends its worker when asked to, in the worker's own thread.

    Celery's flag for that is one for the whole process; and stopped from another thread, two would read the one socket:
    the answer that one of them gets, the other waits for until its time is up.
    """
    from celery.bootsteps import RUN
    from celery.exceptions import WorkerShutdown
    from celery.worker.consumer import Consumer

    def leave_if_asked() -> None:
        if stopping.is_set():
            raise WorkerShutdown(0)

    class Leaving(Consumer):
        def perform_pending_operations(self) -> None:
            """What every round of the loop begins with, and the end of all rounds as well."""
            if self.blueprint.state == RUN:
                leave_if_asked()
            super().perform_pending_operations()

        def ensure_connected(self, conn: Any) -> Any:
            """Tries to reach the broker until it answers."""
            self.first_connection_attempt = False
            return conn.ensure_connection(
                self._log_away,
                callback=leave_if_asked,
                interval_start=_RECONNECT_STEP_S,
                interval_step=_RECONNECT_STEP_S,
                interval_max=_RECONNECT_MOST_S,
            )

        def _log_away(self, error: Exception, pause_s: float) -> None:
            logger.warning("the broker is away", extra={"why": str(error), "pause_s": pause_s})

    return Leaving


def _with_tasks_of(app: Celery) -> Celery:
    """An application of a worker's own: what a worker consumes is state of its application."""
    own = celery_app(app.conf.broker_url)
    own.conf.update(app.conf.changes)
    for name, task in app.tasks.items():
        if not name.startswith("celery."):
            register(own, name, task.run)
    return own
