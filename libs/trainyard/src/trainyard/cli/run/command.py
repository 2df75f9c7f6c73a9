"""From a file to an exit code.

Order is speed here: a yard that has to be started starts while this process still imports, and what only shows things
is imported after the job was submitted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainyard import home
from trainyard.errors import NotRunning

if TYPE_CHECKING:
    from trainyard.client.documents import Document
    from trainyard.client.yards import StartingYard


_TRIES = 5
"""How often a yard may end between being found and being held, as one that was started for another job does."""


def run_file(source: str) -> int:
    """Runs the job of a file (or of its text) and stays with it; returns the exit code of `yard run`.

    Raises:
        YardError: the file cannot be read, or the job could not be submitted.
    """
    from trainyard.client.documents import document

    found = document(source)
    for _ in range(_TRIES):
        code = _run(found)
        if code is not None:
            return code
    raise NotRunning("the yard ends again and again before it can be used", hint="start one with 'yard up'")


def _run(found: Document) -> int | None:
    starting = _start_if_needed()
    import asyncio

    from trainyard.cli.run.session import run

    if starting is not None:
        starting.wait()
    return asyncio.run(run(found))


def _start_if_needed() -> StartingYard | None:
    import os

    from trainyard.client.contexts import Contexts

    folder = home.home()
    elsewhere = os.environ.get("TRAINYARD_ENDPOINT") or Contexts(folder).chosen() is not None
    if elsewhere or home.read_endpoint(folder) is not None:
        return None
    from trainyard.client import yards

    return yards.start(folder, ["--ephemeral"])
