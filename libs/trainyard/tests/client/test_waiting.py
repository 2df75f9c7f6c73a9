"""A yard that was lost is waited for, not in silence, and not in vain."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from trainyard import errors
from trainyard.client.connection import Connection, Target

from scripts.testbed.ports import free_port


async def test_waiting_is_told_and_ends_when_the_cluster_has_no_such_yard_any_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    connection = Connection(Target(f"127.0.0.1:{free_port()}", "token"))
    connection._forward = SimpleNamespace(trouble=errors.NotFound("no release yard"), close=lambda: None)  # type: ignore[assignment]
    with pytest.raises(errors.NotFound, match="no release yard"):
        await connection.until_back(errors.NotRunning("the gateway went away"))
    assert "the gateway went away" in caplog.text
    assert "waiting for up to 300 s" in caplog.text
    await connection.close()
