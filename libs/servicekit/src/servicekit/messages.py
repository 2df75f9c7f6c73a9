"""Names of the messages between services and of the queues that carry them; `servicekit.celery` sends and takes them.

Nothing is imported here: who only needs a name does without Celery.
"""

from __future__ import annotations

LAUNCH = "trainyard.launch"
STOP = "trainyard.stop"
FORGET = "trainyard.forget"


def start_queue(pool: str) -> str:
    """Where attempts to start wait for the launchers of a pool."""
    return f"pool.{pool}.start"


def stop_queue(pool: str) -> str:
    """Where stops wait: a queue of their own, so that a stop never waits behind starts."""
    return f"pool.{pool}.stop"
