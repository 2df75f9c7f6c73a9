"""What a removed job left elsewhere is remembered until launchers confirm that it is gone."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import pytest
from servicekit.errors import reason_of
from trainyard_protos.v1 import scheduler_pb2 as s
from trainyard_scheduler.ledger import Ledger, Transaction
from trainyard_scheduler.tables import ARTIFACTS

from services.scheduler.tests.conftest import OpenYard, open_yard
from services.scheduler.tests.yard import COMPLETED, Clock, Yard, document

Holding = s.ReportHoldingsRequest.Holding


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def yard(tmp_path: Path, open_scheduler: OpenYard, clock: Clock) -> AsyncIterator[Yard]:
    async with open_scheduler(tmp_path, clock=clock) as opened:
        await opened.register(lease_s=3600)
        yield opened


async def expire(yard: Yard, clock: Clock) -> s.Job:
    """A job that ran, and was removed after its TTL."""
    job = await yard.ended((await yard.submit(document(ttl="30m"))).id, COMPLETED)
    yard.move(clock, 1800)
    await yard.forgotten(job.id)
    return job


async def confirm(yard: Yard, *tombstones: s.Tombstone) -> None:
    await yard.launchers.ConfirmTombstones(s.ConfirmTombstonesRequest(tombstones=tombstones))


async def test_each_place_is_listed_until_it_is_confirmed(yard: Yard, clock: Clock) -> None:
    job = await expire(yard, clock)
    place = {"workspace": "default", "job_id": job.id}
    runs, attempts = s.Tombstone(**place), s.Tombstone(**place, pool="local", attempt_ids=[job.attempt_id])
    assert await yard.tombstones() == [runs, attempts]
    assert await yard.tombstones("other") == [runs]
    await confirm(yard, attempts)
    assert await yard.tombstones() == [runs]
    await confirm(yard, runs, attempts)
    assert await yard.tombstones() == []


async def test_what_a_job_names_that_is_submitted_during_a_removal_stays(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = await yard.ended((await yard.submit()).id, COMPLETED)
    write = Ledger.write

    async def meanwhile(self: Ledger, transition: Callable[[Transaction], object]) -> object:
        monkeypatch.setattr(Ledger, "write", write)
        await yard.submit(document("waits", inputs=[{"artifact": "weights@3", "path": "start"}]))
        return await write(self, transition)

    monkeypatch.setattr(Ledger, "write", meanwhile)
    await yard.users.DeleteJob(s.DeleteJobRequest(id=job.id))
    [stays] = [each.kept_references for each in await yard.tombstones(ARTIFACTS) if each.pool == ARTIFACTS]
    assert list(stays) == ["weights@3"]


async def test_a_restart_forgets_no_tombstone(tmp_path: Path, open_scheduler: OpenYard, clock: Clock) -> None:
    async with open_scheduler(tmp_path / "own", clock=clock) as first:
        await first.register(lease_s=3600)
        await expire(first, clock)
        left = await first.tombstones()
    async with open_scheduler(tmp_path / "own", clock=clock) as second:
        assert await second.tombstones() == left != []


async def test_a_job_that_was_never_admitted_left_nothing(yard: Yard, clock: Clock) -> None:
    job = await yard.submit(document(ttl="30m", resources={"cpu": 100}))
    await yard.users.CancelJob(s.CancelJobRequest(id=job.id))
    yard.move(clock, 1800)
    await yard.forgotten(job.id)
    assert await yard.tombstones() == []


async def test_tombstones_are_listed_page_by_page(yard: Yard, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainyard_scheduler.queries._TOMBSTONES_PAGE", 1)
    jobs = [await expire(yard, clock) for _ in range(2)]
    assert [each.job_id for each in await yard.tombstones()] == [job.id for job in jobs for _ in range(2)]


def holding(job_id: str, database_id: str, pool: str = "", attempts: tuple[str, ...] = ()) -> Holding:
    place = s.Tombstone(workspace="default", job_id=job_id, pool=pool, attempt_ids=attempts)
    return Holding(place=place, database_id=database_id)


async def report(yard: Yard, *holdings: Holding) -> int:
    return (await yard.launchers.ReportHoldings(s.ReportHoldingsRequest(holdings=holdings))).unknown


async def test_what_is_held_of_unknown_jobs_is_removed_after_a_grace_time(
    tmp_path: Path, open_scheduler: OpenYard, clock: Clock
) -> None:
    async with open_scheduler(tmp_path / "own", clock=clock, orphan_grace_s=3600) as first:
        await first.register(lease_s=3600)
        known = await first.admitted((await first.submit()).id)
        ours = (await first.claim(known)).assignment.database_id
        runs, folder = holding("lost", ours), holding("lost", ours, "local", ("attempt-1",))
        assert await report(first, runs, folder, holding(known.id, ours)) == 2
        assert await first.tombstones() == []
    async with open_scheduler(tmp_path / "own", clock=clock, orphan_grace_s=3600) as second:
        second.move(clock, 1800)
        assert await report(second, runs, folder) == 2  # found again: the time goes on
        second.move(clock, 1800)
        assert await second.tombstones() == [runs.place, folder.place]


async def test_what_is_held_of_jobs_of_another_database_stays(yard: Yard, clock: Clock) -> None:
    """Of one that was lost and made anew, for instance; or nobody knows of which, because an older version began it."""
    assert await report(yard, holding("lost", "another"), holding("lost", "")) == 0
    yard.move(clock, 1e7)
    assert await yard.tombstones() == []


async def test_a_database_that_is_made_anew_is_another(tmp_path: Path) -> None:
    ids = []
    for name in ("one", "two"):
        async with open_yard(tmp_path / name, database_url="") as yard:
            await yard.register()
            ids.append((await yard.claim(await yard.admitted((await yard.submit()).id))).assignment.database_id)
    assert ids[0] and ids[1] and ids[0] != ids[1]


async def test_what_names_no_folder_is_refused(yard: Yard) -> None:
    await yard.register()
    ours = (await yard.claim(await yard.admitted((await yard.submit()).id))).assignment.database_id
    for attempt in ("", "..", "a/b"):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await report(yard, holding("lost", ours, "local", (attempt,)))
        assert reason_of(refused.value) == "BadId"


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (s.ListTombstonesRequest(), "MissingField"),
        (s.ListTombstonesRequest(pool="local", page_token="?"), "InvalidPage"),
    ],
)
async def test_what_cannot_be_listed_is_refused(yard: Yard, request_: s.ListTombstonesRequest, reason: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await yard.launchers.ListTombstones(request_)
    assert reason_of(refused.value) == reason
