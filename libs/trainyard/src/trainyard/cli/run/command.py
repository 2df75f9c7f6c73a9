"""From a file to an exit code.

Order is speed here: a yard that has to be started starts while this process still imports, and what only shows things
is imported after the job was submitted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainyard import home
from trainyard.errors import NotRunning

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine
    from typing import Any

    from trainyard.client import AsyncClient
    from trainyard.client.documents import Document
    from trainyard.client.yards import StartingYard


_TRIES = 5
"""How often a yard may end between being found and being held, as one that was started for another job does."""


def run_file(source: str) -> int:
    """Runs the job of a file and stays with it; returns the exit code of `yard run`.

    Raises:
        YardError: the file cannot be read, or the job could not be submitted.
    """
    from trainyard.client.documents import document

    return run_document(document(source))


def run_document(document: Document) -> int:
    """Runs the job of a document and stays with it; returns the exit code of `yard run`.

    Raises:
        YardError: the job could not be submitted.
    """

    def work() -> Coroutine[Any, Any, int | None]:
        from trainyard.cli.run.session import run

        return run(document)

    return _with_a_yard(work)


def with_a_yard(work: Callable[[AsyncClient], Awaitable[int]]) -> int:
    """Runs a command's work in the yard that is up, else in one that ends with the command; returns its exit code.

    Raises:
        YardError: as `work`, or no yard could be started.
    """

    def attached() -> Coroutine[Any, Any, int | None]:
        from trainyard.cli.run.session import attached

        return attached(work)

    return _with_a_yard(attached)


def _with_a_yard(work: Callable[[], Coroutine[Any, Any, int | None]]) -> int:
    for _ in range(_TRIES):
        starting = _start_if_needed()
        import asyncio

        import trainyard.cli.run.session  # noqa: F401  # imported while the yard starts

        if starting is not None:
            starting.wait()
        code = asyncio.run(work())
        if code is not None:
            return code
    raise NotRunning("the yard ends again and again before it can be used", hint="start one with 'yard up'")


def _start_if_needed() -> StartingYard | None:
    import os

    from trainyard.client.contexts import Contexts

    folder = home.home()
    elsewhere = os.environ.get("TRAINYARD_ENDPOINT") or Contexts(folder).chosen() is not None
    if elsewhere or home.read_endpoint(folder) is not None:
        return None
    from trainyard.client import yards

    return yards.start(folder, ["--ephemeral"])
