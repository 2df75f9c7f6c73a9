"""A client for commands that only read: while no yard is up, they share one that only reads (decision 0036)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from trainyard import errors, home

if TYPE_CHECKING:
    from trainyard.client.aio import AsyncClient
    from trainyard.client.attachment import Attachment
    from trainyard.client.yards import StartingYard

_TRIES = 5
"""How often the yard that only reads may end between being found and being held, as it does with other commands."""


def start_if_needed() -> StartingYard | None:
    """Starts a yard that only reads when the context is this machine, no yard is up, and the home has data."""
    from trainyard.client.contexts import Contexts

    folder = home.home()
    elsewhere = os.environ.get("TRAINYARD_ENDPOINT") or Contexts(folder).chosen() is not None
    if elsewhere or home.read_endpoint(folder) or home.read_endpoint(folder, home.READER_FILE):
        return None
    if not home.has_data(folder):
        return None
    from trainyard.client import yards

    return yards.start_reading(folder)


@asynccontextmanager
async def reading_client(starting: StartingYard | None = None) -> AsyncIterator[AsyncClient]:
    """A client of the yard that commands talk to, else of one that only reads, held for as long as the context lasts.

    Args:
        starting: what `start_if_needed` began.

    Raises:
        NotRunning: no yard is up, and there is nothing to read or it cannot be read.
        YardError: as `AsyncClient`.
    """
    client, attachment = await _open(starting)
    try:
        async with client:
            yield client
    finally:
        if attachment is not None:
            attachment.release()


async def _open(starting: StartingYard | None) -> tuple[AsyncClient, Attachment | None]:
    from trainyard.client.aio import AsyncClient
    from trainyard.client.connection import NO_YARD

    for _ in range(_TRIES):
        if starting is not None:
            await asyncio.to_thread(starting.wait)
        try:
            return AsyncClient(), None
        except errors.NotRunning as error:
            if error.reason != NO_YARD or not home.has_data(home.home()):
                raise
        try:
            client = AsyncClient.of_this_machine(reading=True)
        except errors.NotRunning:
            starting = start_if_needed()
            continue
        try:
            return client, await client.attach()
        except errors.NotRunning:
            await client.close()
            starting = start_if_needed()
    raise errors.NotRunning("the yard that reads ends again and again", hint="start one with 'yard up'")
