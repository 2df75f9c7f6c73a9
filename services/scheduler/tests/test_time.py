"""What happens because time passes. The clock stands still until a test moves it."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import grpc
import pytest
from servicekit.errors import reason_of
from trainyard_protos.v1 import scheduler_pb2 as s
from trainyard_scheduler.timers import TimerKind, Timers

from services.scheduler.tests.conftest import OpenYard
from services.scheduler.tests.yard import COMPLETED, Clock, Yard, document, exit_of


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def yard(tmp_path: Path, open_scheduler: OpenYard, clock: Clock) -> AsyncIterator[Yard]:
    async with open_scheduler(tmp_path, clock=clock, finalize_timeout_s=60, reclaim_after_s=10) as opened:
        await opened.register(lease_s=3600)
        yield opened


async def test_a_retry_waits_for_its_backoff(yard: Yard, clock: Clock) -> None:
    job = await yard.ended((await yard.submit(document(retries={"limit": 2, "backoff": "20s"}))).id, exit_of())
    assert (job.state, job.pending.reason) == (s.JOB_STATE_QUEUED, "Backoff")
    assert job.pending.not_before_ns == clock.now_ns + 20_000_000_000
    other = await yard.admitted((await yard.submit()).id)
    assert other.state == s.JOB_STATE_STARTING  # who backs off blocks nobody
    yard.move(clock, 20)
    assert (await yard.admitted(job.id)).attempt == 2


async def test_a_running_job_is_stopped_at_its_deadline_and_fails(yard: Yard, clock: Clock) -> None:
    job = await yard.started((await yard.submit(document(deadline="1h", retries={"limit": 3}))).id)
    yard.move(clock, 3600)
    assert (await yard.until(job.id, "Stopping")).reason == "DeadlineExceeded"
    await yard.report(job, s.ATTEMPT_PHASE_ENDED, exit_of("Stopped", signal="SIGTERM"))
    failed = await yard.job(job.id)
    assert (failed.state, failed.reason) == (s.JOB_STATE_FAILED, "DeadlineExceeded")


async def test_the_deadline_counts_all_attempts_and_ends_a_job_that_backs_off(yard: Yard, clock: Clock) -> None:
    text = document(deadline="1m", retries={"limit": 3, "backoff": "5m"})
    job = await yard.ended((await yard.submit(text)).id, exit_of())
    yard.move(clock, 60)
    assert (await yard.until(job.id, "Failed")).reason == "DeadlineExceeded"


async def test_the_deadline_ends_an_attempt_nobody_claimed_and_frees_its_room(yard: Yard, clock: Clock) -> None:
    whole = {"cpu": 4, "memory": "1Gi"}
    job = await yard.admitted((await yard.submit(document(deadline="1m", resources=whole))).id)
    yard.move(clock, 60)
    await yard.until(job.id, "Failed")
    assert (await yard.claim(job)).stale
    assert (await yard.admitted((await yard.submit(document(resources=whole))).id)).state == s.JOB_STATE_STARTING


async def test_a_job_whose_workers_ended_in_time_may_store_what_they_made(yard: Yard, clock: Clock) -> None:
    job = await yard.started((await yard.submit(document(deadline="1m"))).id)
    yard.move(clock, 59)
    await yard.report(job, s.ATTEMPT_PHASE_FINISHING, COMPLETED)
    yard.move(clock, 5)
    await yard.report(job, s.ATTEMPT_PHASE_ENDED, COMPLETED)
    assert (await yard.job(job.id)).state == s.JOB_STATE_SUCCEEDED


async def test_outputs_that_are_not_stored_in_time_fail_the_attempt(yard: Yard, clock: Clock) -> None:
    job = await yard.started((await yard.submit(document(gracePeriod="30s"))).id)
    await yard.report(job, s.ATTEMPT_PHASE_FINISHING, COMPLETED)
    yard.move(clock, 90)
    assert (await yard.until(job.id, "Failed")).reason == "OutputsNotStored"
    assert (await yard.report(job, s.ATTEMPT_PHASE_ENDED, COMPLETED)).stale
    stop = await yard.message("pool.local.stop", "attempt_id", job.attempt_id)
    assert (stop["task"], stop["fence"]) == ("trainyard.stop", 1)


async def test_a_success_whose_outputs_are_being_published_can_be_neither_cancelled_nor_given_up(
    yard: Yard, clock: Clock
) -> None:
    given_up, job, sudden = [await yard.started((await yard.submit()).id) for _ in range(3)]
    for each in (given_up, job):
        await yard.report(each, s.ATTEMPT_PHASE_FINISHING, COMPLETED)
    for each in (job, job, sudden):  # what is said twice changes nothing
        answer = await yard.report(each, s.ATTEMPT_PHASE_PUBLISHING, COMPLETED)
        assert (answer.stale, answer.stop) == (False, False)
    yard.move(clock, 90)
    await yard.until(given_up.id, "Failed")
    for each in (job, sudden):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await yard.users.CancelJob(s.CancelJobRequest(id=each.id))
        assert reason_of(refused.value) == "AlreadyEnded"
        assert (await yard.job(each.id)).state == s.JOB_STATE_FINALIZING
        assert [event.type for event in await yard.events(each.id)].count("Finalizing") == 1
        await yard.report(each, s.ATTEMPT_PHASE_ENDED, COMPLETED)
        assert (await yard.job(each.id)).state == s.JOB_STATE_SUCCEEDED


async def test_an_attempt_nobody_claims_is_announced_again(yard: Yard, clock: Clock) -> None:
    job = await yard.admitted((await yard.submit()).id)
    first = await yard.message("pool.local.start", "attempt_id", job.attempt_id)
    yard.move(clock, 10)
    assert await yard.message("pool.local.start", "attempt_id", job.attempt_id) == first


async def test_a_pool_that_falls_silent_takes_no_new_work_and_keeps_what_runs(yard: Yard, clock: Clock) -> None:
    running = await yard.started((await yard.submit()).id)
    yard.move(clock, 3600)
    await yard.until("", "PoolLost")
    waiting = await yard.submit()
    assert waiting.pending.reason == "NoPool"
    assert "'local'" in waiting.pending.message
    assert (await yard.job(running.id)).state == s.JOB_STATE_RUNNING
    await yard.register(lease_s=3600)
    assert (await yard.admitted(waiting.id)).state == s.JOB_STATE_STARTING
    pool = (await yard.users.ListPools(s.ListPoolsRequest())).pools[0]
    assert (pool.alive, pool.machines[0].free.cpu) == (True, 2)


async def test_what_a_lost_pool_had_not_taken_goes_back_to_the_queue(yard: Yard, clock: Clock) -> None:
    job = await yard.admitted((await yard.submit()).id)
    yard.move(clock, 3600)
    assert (await yard.until(job.id, "Requeued")).reason == "PoolLost"
    assert (await yard.claim(job)).stale
    assert (await yard.job(job.id)).pending.reason == "NoPool"
    await yard.register(lease_s=3600)
    again = await yard.admitted(job.id)
    assert (again.attempt, again.retries_used) == (2, 0)


async def test_a_restart_announces_at_once_what_nobody_claimed(
    tmp_path: Path, open_scheduler: OpenYard, clock: Clock
) -> None:
    async with open_scheduler(tmp_path / "own", clock=clock) as first:
        await first.register(lease_s=3600)
        job = await first.admitted((await first.submit()).id)
        sent = await first.message("pool.local.start", "attempt_id", job.attempt_id)
    async with open_scheduler(tmp_path / "own", clock=clock) as second:
        assert await second.message("pool.local.start", "attempt_id", job.attempt_id) == sent
        assert not (await second.claim(job)).stale


async def test_a_lease_is_renewed_without_a_word(yard: Yard, clock: Clock) -> None:
    for _ in range(3):
        yard.move(clock, 3000)
        await yard.register(lease_s=3600)
    assert [event.type for event in await yard.events()] == ["PoolRegistered"]


async def test_a_job_is_forgotten_after_its_ttl_and_its_launcher_is_told(yard: Yard, clock: Clock) -> None:
    """In words that launchers of the first version know: they take no other arguments."""
    job = await yard.ended((await yard.submit(document(ttl="30m"))).id, COMPLETED)
    kept = await yard.ended((await yard.submit()).id, COMPLETED)
    yard.move(clock, 1800)
    message = await yard.message("pool.local.stop", "job_id", job.id)
    assert message == {
        "task": "trainyard.forget",
        "job_id": job.id,
        "attempt_ids": [job.attempt_id],
    }
    with pytest.raises(grpc.aio.AioRpcError) as gone:
        await yard.job(job.id)
    assert reason_of(gone.value) == "JobNotFound"
    assert (await yard.job(kept.id)).state == s.JOB_STATE_SUCCEEDED


async def test_a_number_is_not_given_again_while_other_jobs_of_the_name_are_there(yard: Yard, clock: Clock) -> None:
    await yard.submit()
    removed = await yard.ended((await yard.submit(document(ttl="30m"))).id, COMPLETED)
    yard.move(clock, 1800)
    await yard.forgotten(removed.id)
    assert (removed.number, (await yard.submit()).number) == (2, 3)


async def test_the_numbers_of_a_name_begin_at_1_when_all_its_jobs_were_removed(yard: Yard, clock: Clock) -> None:
    removed = await yard.ended((await yard.submit(document(ttl="30m"))).id, COMPLETED)
    yard.move(clock, 1800)
    await yard.forgotten(removed.id)
    assert (await yard.submit()).number == 1


async def test_the_ttl_of_a_job_retried_by_a_user_starts_anew(yard: Yard, clock: Clock) -> None:
    job = await yard.ended((await yard.submit(document(ttl="30m"))).id, exit_of())
    await yard.users.RetryJob(s.RetryJobRequest(id=job.id))
    yard.move(clock, 1800)
    assert (await yard.ended(job.id, COMPLETED)).state == s.JOB_STATE_SUCCEEDED


async def test_event_numbers_go_on_after_everything_was_forgotten(
    tmp_path: Path, open_scheduler: OpenYard, clock: Clock
) -> None:
    async with open_scheduler(tmp_path / "own", clock=clock) as first:
        job = await first.submit(document(ttl="30m"))
        newest = (await first.users.CancelJob(s.CancelJobRequest(id=job.id))).event_seq
        first.move(clock, 1800)
        await first.scheduler._duties._expiry([])
    async with open_scheduler(tmp_path / "own", clock=clock) as second:
        assert (await second.submit()).event_seq > newest


HOUR_S = 3600.0


@pytest.mark.parametrize("step_s", [HOUR_S, -HOUR_S])
async def test_a_step_of_the_wall_clock_moves_no_deadline_and_no_backoff(
    yard: Yard, clock: Clock, step_s: float
) -> None:
    running = await yard.started((await yard.submit(document(deadline="1m"))).id)
    waiting = await yard.ended((await yard.submit(document(retries={"limit": 2, "backoff": "20s"}))).id, exit_of())
    clock.step(step_s)
    yard.move(clock, 19)
    assert [(await yard.job(each.id)).state for each in (running, waiting)] == [
        s.JOB_STATE_RUNNING,
        s.JOB_STATE_QUEUED,
    ]
    yard.move(clock, 1)
    assert (await yard.admitted(waiting.id)).attempt == 2
    yard.move(clock, 40)
    stopping = await yard.until(running.id, "Stopping")
    assert (stopping.reason, stopping.time_ns) == ("DeadlineExceeded", clock.now_ns)


@pytest.mark.parametrize("step_s", [HOUR_S, -HOUR_S])
async def test_a_step_of_the_wall_clock_gives_no_attempt_less_or_more_time_to_store_its_outputs(
    yard: Yard, clock: Clock, step_s: float
) -> None:
    job = await yard.started((await yard.submit(document(gracePeriod="30s"))).id)
    await yard.report(job, s.ATTEMPT_PHASE_FINISHING, COMPLETED)
    clock.step(step_s)
    yard.move(clock, 89)
    assert (await yard.job(job.id)).state == s.JOB_STATE_FINALIZING
    yard.move(clock, 1)
    assert (await yard.until(job.id, "Failed")).reason == "OutputsNotStored"


@pytest.mark.parametrize("step_s", [2 * HOUR_S, -2 * HOUR_S])
async def test_a_step_of_the_wall_clock_is_no_launchers_silence(yard: Yard, clock: Clock, step_s: float) -> None:
    clock.step(step_s)
    yard.move(clock, 3599)
    assert (await yard.submit()).pending.reason != "NoPool"
    yard.move(clock, 1)
    await yard.until("", "PoolLost")


async def test_a_night_in_which_the_machine_slept_is_no_launchers_silence_and_counts_for_a_deadline(
    yard: Yard, clock: Clock
) -> None:
    job = await yard.started((await yard.submit(document(deadline="8h"))).id)
    clock.sleep(8 * HOUR_S)
    yard.move(clock, 0)
    assert (await yard.until(job.id, "Stopping")).reason == "DeadlineExceeded"
    assert "PoolLost" not in [event.type for event in await yard.events()]


async def test_no_job_is_removed_because_the_wall_clock_was_set_forward_and_none_stays_because_it_was_set_back(
    yard: Yard, clock: Clock
) -> None:
    job = await yard.ended((await yard.submit(document(ttl="1h"))).id, COMPLETED)
    clock.step(24 * HOUR_S)
    yard.move(clock, 3599)
    assert (await yard.job(job.id)).state == s.JOB_STATE_SUCCEEDED
    clock.step(-24 * HOUR_S)
    yard.move(clock, 1)
    await yard.forgotten(job.id)


async def test_a_restart_continues_from_the_stored_times(
    tmp_path: Path, open_scheduler: OpenYard, clock: Clock
) -> None:
    async with open_scheduler(tmp_path, clock=clock) as before:
        await before.register(lease_s=3600)
        job = await before.started((await before.submit(document(deadline="1m"))).id)
        before.move(clock, 40)
    async with open_scheduler(tmp_path, clock=clock) as after:
        after.move(clock, 19)
        assert (await after.job(job.id)).state == s.JOB_STATE_RUNNING
        after.move(clock, 1)
        assert (await after.until(job.id, "Stopping")).reason == "DeadlineExceeded"


async def test_a_lease_that_is_renewed_while_its_end_cannot_be_stored_is_not_over_a_moment_later(clock: Clock) -> None:
    timers = Timers(clock)
    failed = asyncio.Event()

    async def renewed_then_away(due: Mapping[str, int]) -> None:
        for name in due:
            timers.after(TimerKind.LEASE, name, 60_000_000_000)
        failed.set()
        raise ConnectionError("the database is away")

    timers.after(TimerKind.LEASE, "local", 0)
    timers.start({TimerKind.LEASE: renewed_then_away})
    await failed.wait()
    await timers.stop()
    assert timers.fires_ns(TimerKind.LEASE, "local") == clock.steady_ns() + 60_000_000_000
