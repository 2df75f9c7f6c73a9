"""How long agents are silent, as the launcher tells the place where they run."""

from __future__ import annotations

import math
from typing import Any

import pytest
from api_server import facts
from trainyard_launcher.backend import Found, Place
from trainyard_launcher.settings import Settings
from trainyard_launcher.supervisor import Supervisor


class Finds:
    """A backend that finds an attempt of an earlier life of the launcher."""

    async def open(self, observer: object) -> list[Found]:
        return [Found(facts(1))]

    def place(self, attempt_id: str, node: int) -> Place:
        return Place("")

    async def close(self) -> None: ...


@pytest.fixture
def supervisor() -> Supervisor:
    parts: dict[str, Any] = {"stub": None, "planner": None, "closing": None, "backend": Finds()}
    return Supervisor(launcher_id="here", settings=Settings(), **parts)


async def test_who_was_not_heard_yet_in_this_life_of_the_launcher_is_silent_since_it_began(
    supervisor: Supervisor,
) -> None:
    await supervisor.open()
    assert math.isfinite(supervisor.silent_s(facts(1).attempt_id, 0))
    assert supervisor.silent_s(facts(2).attempt_id, 0) == math.inf
    await supervisor.close()


async def test_who_has_no_machine_yet_is_not_silent(supervisor: Supervisor) -> None:
    """A machine is lost when it is not ready and its agents are silent: an API server may be away for long before a pod
    is there, and its machine is not ready for an instant afterwards."""
    await supervisor.open()
    attempt = supervisor.attempts.get(facts(1).attempt_id)
    assert attempt is not None
    attempt.nodes[0].heard -= 1e6
    assert supervisor.silent_s(facts(1).attempt_id, 0) > 1e5
    supervisor.placed(facts(1).attempt_id)
    assert supervisor.silent_s(facts(1).attempt_id, 0) < 1e5
    await supervisor.close()
