"""Asking an API server that may be away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from trainyard.cluster import ApiError

from trainyard_launcher.scheduler import backoff

logger = logging.getLogger(__name__)


async def patiently(ask: Callable[[], Awaitable[dict[str, Any]]], within_s: float) -> dict[str, Any]:
    """Makes or reads an object; waits for an API server that is away.

    Args:
        within_s: for how long.

    Raises:
        ApiError: it said no, or was away for too long.
    """
    give_up = asyncio.get_running_loop().time() + within_s
    for pause_s in backoff():
        try:
            return await ask()
        except ApiError as error:
            if not error.away or asyncio.get_running_loop().time() > give_up:
                raise
            logger.info("cluster is away", extra={"code": error.status, "why": str(error)})
        await asyncio.sleep(pause_s)
    raise AssertionError("backoff never ends")
