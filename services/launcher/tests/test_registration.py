"""A launcher announces the machines that there are, again and again, and says whether the scheduler takes them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from launcher_yard import Scheduler, running_yard
from trainyard_launcher.backends.process import ProcessBackend
from trainyard_protos.v1 import scheduler_pb2

NODES = [scheduler_pb2.Machine(name="node-0")]


async def announced(scheduler: Scheduler, machines: list[scheduler_pb2.Machine]) -> None:
    """Waits for two registrations: the last one in which a refusal was still under way, and one after it."""
    for _ in range(2):
        count = len(scheduler.pools)
        await scheduler.until(lambda count=count: len(scheduler.pools) > count)
    assert list(scheduler.pools[-1].machines) == machines


async def test_every_try_announces_the_machines_of_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machines: list[scheduler_pb2.Machine] = []
    monkeypatch.setattr(ProcessBackend, "offer", lambda _: scheduler_pb2.RegisterPoolRequest(machines=machines))
    async with running_yard(tmp_path) as yard:
        yard.scheduler.no_pools = True
        await announced(yard.scheduler, [])
        machines = NODES
        await announced(yard.scheduler, NODES)
        yard.scheduler.no_pools = False
        await announced(yard.scheduler, NODES)


async def test_machines_that_change_are_announced_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machines, event = list(NODES), asyncio.Event()

    async def changed(_: object) -> None:
        await event.wait()
        event.clear()

    monkeypatch.setattr(ProcessBackend, "offer", lambda _: scheduler_pb2.RegisterPoolRequest(machines=machines))
    monkeypatch.setattr(ProcessBackend, "changed", changed)
    async with running_yard(tmp_path, renew_s=3600, lease_s=3600) as yard:
        yard.scheduler.renew_after_s = 3600
        for expected in ([], NODES):  # the second is told in the hour that the answer to the first one gave
            machines[:] = expected
            event.set()
            await yard.scheduler.until(
                lambda expected=expected: [list(each.machines) for each in yard.scheduler.pools[-1:]] == [expected]
            )


async def test_a_launcher_is_ready_while_its_pool_has_a_lease(tmp_path: Path) -> None:
    async with running_yard(tmp_path, lease_s=0.1) as yard:
        await yard.scheduler.until(lambda: yard.scheduler.ready)
        yard.scheduler.no_pools = True
        await yard.scheduler.until(lambda: not yard.scheduler.ready)
        yard.scheduler.no_pools = False
        await yard.scheduler.until(lambda: yard.scheduler.ready)
