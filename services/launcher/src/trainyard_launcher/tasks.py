"""Celery's side of the launcher: messages wake, the loop acts.

A task waits until what it asked for is done, so that `acks_late` means what it says: a message that was not acted on,
because this process died, is delivered again. Doubled deliveries are harmless (claims, fences, `started` files).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

from celery import Celery
from servicekit import celery
from servicekit.messages import FORGET, LAUNCH, STOP

logger = logging.getLogger(__name__)

OnAttempt = Callable[[str, int], Coroutine[Any, Any, None]]
OnForget = Callable[[], None]


def register(
    app: Celery,
    loop: asyncio.AbstractEventLoop,
    timeout_s: float,
    *,
    launch: OnAttempt,
    stop: OnAttempt,
    forget: OnForget,
) -> None:
    """Makes the launcher's tasks known to an application, before its workers start.

    Args:
        loop: where the three functions run.
        timeout_s: how long a task waits for one.
    """

    def on_launch(attempt_id: str, fence: int) -> None:
        _wait(loop, launch(attempt_id, fence), timeout_s, LAUNCH, attempt_id)

    def on_stop(attempt_id: str, fence: int) -> None:
        _wait(loop, stop(attempt_id, fence), timeout_s, STOP, attempt_id)

    def on_forget(job_id: str, attempt_ids: list[str], workspace: str = "") -> None:
        # What is to be removed is asked of the scheduler, which has it until that is confirmed.
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(forget)

    for name, task in ((LAUNCH, on_launch), (STOP, on_stop), (FORGET, on_forget)):
        celery.register(app, name, task)


def _wait(
    loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, None], timeout_s: float, task: str, about: str
) -> None:
    if loop.is_closed():
        work.close()
        return
    future = asyncio.run_coroutine_threadsafe(work, loop)
    try:
        future.result(timeout_s)
    except FutureTimeoutError:
        # The scheduler announces again what nobody claimed; a claimed start goes on without this task.
        future.cancel()
        logger.warning("task took too long", extra={"task": task, "about": about, "limit_s": timeout_s})
    except Exception:
        logger.exception("task failed", extra={"task": task, "about": about})
