"""Claims, fences, stops, and everything a launcher may say late or twice."""

import asyncio
from pathlib import Path

import grpc
import pytest
from servicekit.errors import reason_of
from trainyard.channel import connect
from trainyard_protos.v1 import common_pb2 as c
from trainyard_protos.v1 import scheduler_pb2 as s
from trainyard_protos.v1 import scheduler_pb2_grpc

from services.scheduler.tests.conftest import OpenYard
from services.scheduler.tests.yard import COMPLETED, LAUNCHER, Yard, document, exit_of

RETRY_ONCE = {"limit": 1, "backoff": "0s"}


async def test_a_second_claim_by_the_same_launcher_gets_the_same_assignment(yard: Yard) -> None:
    await yard.register()
    job = await yard.admitted((await yard.submit()).id)
    first, second = await yard.claim(job), await yard.claim(job)
    assert first == second
    assert not first.stale
    assert [event.type for event in await yard.events(job.id)].count("Claimed") == 1


async def test_another_launcher_gets_nothing_of_a_claimed_attempt(yard: Yard) -> None:
    await yard.register()
    job = await yard.admitted((await yard.submit()).id)
    await yard.claim(job)
    stale = await yard.claim(job, launcher="launcher-2")
    assert stale.stale
    assert LAUNCHER in stale.stale_reason
    assert (await yard.report(job, s.ATTEMPT_PHASE_ENDED, COMPLETED, launcher="launcher-2")).stale


async def test_a_call_of_many_claims_answers_each_in_order_and_refuses_only_the_wrong_one(yard: Yard) -> None:
    await yard.register()
    job = await yard.admitted((await yard.submit()).id)
    mine = s.ClaimAttemptRequest(attempt_id=job.attempt_id, fence=job.attempt, launcher_id=LAUNCHER)
    nobody = s.ClaimAttemptRequest(attempt_id=job.attempt_id, fence=job.attempt)
    unknown = s.ClaimAttemptRequest(attempt_id="unknown", fence=1, launcher_id=LAUNCHER)
    results = (await yard.launchers.ClaimAttempts(s.ClaimAttemptsRequest(requests=[nobody, unknown, mine]))).results
    assert [result.code for result in results] == [grpc.StatusCode.INVALID_ARGUMENT.value[0], 0, 0]
    assert [result.answer.stale for result in results] == [False, True, False]
    assert results[2].answer == await yard.claim(job)


async def test_claims_whose_specs_are_too_large_for_one_answer_are_to_be_repeated(yard: Yard) -> None:
    await yard.register(cpu=16, memory_gi=16)
    env = {f"PART_{number}": "x" * 10_000 for number in range(90)}
    jobs = [await yard.admitted((await yard.submit(document(env=env))).id) for _ in range(10)]
    requests = [s.ClaimAttemptRequest(attempt_id=j.attempt_id, fence=j.attempt, launcher_id=LAUNCHER) for j in jobs]
    results = (await yard.launchers.ClaimAttempts(s.ClaimAttemptsRequest(requests=requests))).results
    refused = [request for request, result in zip(requests, results, strict=True) if result.code]
    assert 0 < len(refused) < len(jobs)
    again = (await yard.launchers.ClaimAttempts(s.ClaimAttemptsRequest(requests=refused))).results
    assert [result.answer.assignment.attempt_id for result in again] == [request.attempt_id for request in refused]


async def test_reports_of_many_attempts_in_one_call_each_count(yard: Yard) -> None:
    await yard.register()
    jobs = [await yard.started((await yard.submit()).id) for _ in range(3)]
    ends = [
        s.ReportAttemptRequest(
            attempt_id=job.attempt_id, fence=job.attempt, launcher_id=LAUNCHER, phase=s.ATTEMPT_PHASE_ENDED, exit=exit
        )
        for job, exit in zip(jobs, (COMPLETED, exit_of(), COMPLETED), strict=True)
    ]
    await yard.launchers.ReportAttempts(s.ReportAttemptsRequest(requests=ends))
    states = [(await yard.job(job.id)).state for job in jobs]
    assert states == [s.JOB_STATE_SUCCEEDED, s.JOB_STATE_FAILED, s.JOB_STATE_SUCCEEDED]


async def test_a_call_of_too_many_claims_is_refused(yard: Yard) -> None:
    request = s.ClaimAttemptRequest(attempt_id="a", fence=1, launcher_id=LAUNCHER)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await yard.launchers.ClaimAttempts(s.ClaimAttemptsRequest(requests=[request] * 201))
    assert reason_of(refused.value) == "BatchTooLarge"


async def test_of_many_claims_at_once_one_launcher_wins(yard: Yard) -> None:
    await yard.register()
    job = await yard.admitted((await yard.submit()).id)
    answers = await asyncio.gather(*(yard.claim(job, launcher=f"launcher-{i}") for i in range(20)))
    assert sum(not answer.stale for answer in answers) == 1


async def test_an_attempt_that_ended_or_never_was_cannot_be_claimed(yard: Yard) -> None:
    await yard.register()
    job = await yard.ended((await yard.submit()).id, COMPLETED)
    assert (await yard.claim(job)).stale
    assert (await yard.claim(s.Job(attempt_id="nobody", attempt=1))).stale


async def test_reports_of_an_old_fence_change_nothing(yard: Yard) -> None:
    await yard.register()
    old = await yard.ended((await yard.submit(document(retries=RETRY_ONCE))).id, exit_of())
    first_attempt = s.Job(attempt_id=old.attempts[0].id, attempt=1)
    new = await yard.started(old.id)
    assert new.attempt == 2
    assert (await yard.report(first_attempt, s.ATTEMPT_PHASE_ENDED, COMPLETED)).stale
    assert (await yard.report(s.Job(attempt_id=new.attempt_id, attempt=1), s.ATTEMPT_PHASE_ENDED, COMPLETED)).stale
    assert (await yard.job(old.id)).state == s.JOB_STATE_RUNNING


async def test_a_report_without_a_claim_is_stale(yard: Yard) -> None:
    await yard.register()
    job = await yard.admitted((await yard.submit()).id)
    assert (await yard.report(job, s.ATTEMPT_PHASE_STARTED)).stale


async def test_late_and_doubled_phases_do_not_go_backwards(yard: Yard) -> None:
    await yard.register()
    job = await yard.started((await yard.submit()).id)
    await yard.report(job, s.ATTEMPT_PHASE_FINISHING, COMPLETED)
    for phase in (s.ATTEMPT_PHASE_STARTED, s.ATTEMPT_PHASE_FINISHING):
        assert not (await yard.report(job, phase, COMPLETED)).stale
    assert (await yard.job(job.id)).state == s.JOB_STATE_FINALIZING
    assert [event.type for event in await yard.events(job.id)].count("Finalizing") == 1


async def test_a_failure_within_the_budget_gets_a_new_attempt_with_a_higher_fence(yard: Yard) -> None:
    await yard.register()
    failed = await yard.ended((await yard.submit(document(retries=RETRY_ONCE))).id, exit_of(exit_code=1))
    again = await yard.admitted(failed.id)
    assert (again.attempt, again.retries_used) == (2, 1)
    last = await yard.ended(failed.id, exit_of(exit_code=1, message="no luck"))
    assert (last.state, last.reason) == (s.JOB_STATE_FAILED, "RetryLimit")
    assert "no luck" in last.message
    assert [attempt.number for attempt in last.attempts] == [1, 2]


async def test_each_attempt_keeps_its_own_failure_with_its_meaning_over_a_restart(
    tmp_path: Path, open_scheduler: OpenYard
) -> None:
    used = c.MemoryUse(peak_bytes=2**28, limit_bytes=2**29, enforced=True, oom_kills=0)
    async with open_scheduler(tmp_path) as yard:
        await yard.register()
        first = exit_of(signal="SIGSEGV", first_failing_rank=1, node=0, local_rank=1, last_lines=["so far"])
        job = await yard.ended((await yard.submit(document(retries=RETRY_ONCE))).id, first)
        await yard.admitted(job.id)
        await yard.ended(job.id, exit_of(exit_code=3, first_failing_rank=0, memory=used))
    async with open_scheduler(tmp_path) as yard:
        one, two = (attempt.exit for attempt in (await yard.job(job.id)).attempts)
        explained = (await yard.users.ExplainJob(s.ExplainJobRequest(id=job.id))).job.exit
    assert (one.first_failing_rank, one.local_rank, list(one.last_lines)) == (1, 1, ["so far"])
    assert one.meaning.startswith("SIGSEGV: native code accessed invalid memory")
    assert (two.meaning, two.memory) == ("exit code 3", used)
    assert explained == two


async def test_a_checkpoint_that_led_nowhere_is_not_resumed_from_again(yard: Yard) -> None:
    await yard.register()
    job = await yard.submit(document(retries={"limit": 3, "backoff": "0s"}))
    await yard.ended(job.id, exit_of(resumed_from="version-7"))
    again = await yard.admitted(job.id)
    assert list((await yard.claim(again)).assignment.rejected_checkpoints) == ["version-7"]
    await yard.report(again, s.ATTEMPT_PHASE_ENDED, exit_of(resumed_from="version-6", progressed=True))
    third = await yard.admitted(job.id)
    assert list((await yard.claim(third)).assignment.rejected_checkpoints) == ["version-7"]


async def test_cancel_ends_a_queued_job_at_once(yard: Yard) -> None:
    job = await yard.submit()
    cancelled = await yard.users.CancelJob(s.CancelJobRequest(id=job.id, message="typo"))
    assert (cancelled.state, cancelled.message) == (s.JOB_STATE_CANCELLED, "typo")
    assert (await yard.users.CancelJob(s.CancelJobRequest(id=job.id))).state == s.JOB_STATE_CANCELLED


async def test_cancel_of_an_unclaimed_attempt_makes_its_late_claim_stale_and_frees_the_room(yard: Yard) -> None:
    await yard.register(cpu=1)
    job = await yard.admitted((await yard.submit()).id)
    assert (await yard.users.CancelJob(s.CancelJobRequest(id=job.id))).state == s.JOB_STATE_CANCELLED
    assert (await yard.claim(job)).stale
    assert (await yard.admitted((await yard.submit()).id)).state == s.JOB_STATE_STARTING


@pytest.mark.parametrize("phase", [None, s.ATTEMPT_PHASE_STARTED, s.ATTEMPT_PHASE_FINISHING])
async def test_cancel_of_a_claimed_attempt_stops_it_and_the_job_is_cancelled_whatever_its_exit(
    yard: Yard, phase: "s.AttemptPhase | None"
) -> None:
    await yard.register()
    job = await yard.admitted((await yard.submit()).id)
    await yard.claim(job)
    if phase is not None:
        await yard.report(job, phase, COMPLETED)
    stopping = await yard.users.CancelJob(s.CancelJobRequest(id=job.id, message="wrong data"))
    assert (stopping.state, stopping.message) == (s.JOB_STATE_STOPPING, "wrong data")
    assert (await yard.claim(job)).assignment.stopping
    assert (await yard.report(job, s.ATTEMPT_PHASE_STARTED)).stop
    assert (await yard.report(job, s.ATTEMPT_PHASE_PUBLISHING, COMPLETED)).stop
    assigned = await yard.launchers.ListAssigned(s.ListAssignedRequest(pool="local", launcher_id=LAUNCHER))
    assert [(a.attempt_id, a.stopping) for a in assigned.attempts] == [(job.attempt_id, True)]
    await yard.report(job, s.ATTEMPT_PHASE_ENDED, COMPLETED)
    ended = await yard.job(job.id)
    assert (ended.state, ended.reason, ended.message) == (s.JOB_STATE_CANCELLED, "Cancelled", "wrong data")
    assert "wrong data" in (await yard.users.ExplainJob(s.ExplainJobRequest(id=job.id))).summary
    cancelled = (await yard.users.ListEvents(s.ListEventsRequest(job=job.id))).events[-1]
    assert (cancelled.type, cancelled.message) == ("Cancelled", "wrong data")


async def test_a_stop_goes_to_the_queue_of_stops(yard: Yard) -> None:
    await yard.register()
    job = await yard.started((await yard.submit()).id)
    await yard.users.CancelJob(s.CancelJobRequest(id=job.id))
    stop = {"task": "trainyard.stop", "attempt_id": job.attempt_id, "fence": 1}
    assert await yard.message("pool.local.stop", "attempt_id", job.attempt_id) == stop
    launch = {**stop, "task": "trainyard.launch"}
    assert await yard.message("pool.local.start", "attempt_id", job.attempt_id) == launch


async def test_what_has_ended_cannot_be_cancelled(yard: Yard) -> None:
    await yard.register()
    job = await yard.ended((await yard.submit()).id, COMPLETED)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await yard.users.CancelJob(s.CancelJobRequest(id=job.id))
    assert (refused.value.code(), reason_of(refused.value)) == (grpc.StatusCode.FAILED_PRECONDITION, "AlreadyEnded")


async def test_a_user_can_retry_a_failed_job_with_a_fresh_budget(yard: Yard) -> None:
    await yard.register()
    job = await yard.submit(document(retries=RETRY_ONCE))
    await yard.ended(job.id, exit_of())
    await yard.ended(job.id, exit_of())
    again = await yard.users.RetryJob(s.RetryJobRequest(id=job.id))
    assert (again.state, again.retries_used, again.ended_ns) == (s.JOB_STATE_QUEUED, 0, 0)
    done = await yard.ended(job.id, COMPLETED)
    assert (done.state, done.attempt) == (s.JOB_STATE_SUCCEEDED, 3)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await yard.users.RetryJob(s.RetryJobRequest(id=job.id))
    assert reason_of(refused.value) == "AlreadySucceeded"


async def test_a_note_becomes_an_event(yard: Yard) -> None:
    await yard.register()
    job = await yard.started((await yard.submit()).id)
    await yard.report(job, s.ATTEMPT_PHASE_UNSPECIFIED, note="rank 1 is silent", note_reason="Hung")
    last = (await yard.events(job.id))[-1]
    assert (last.type, last.reason, last.message, last.actor) == (
        "Note",
        "Hung",
        "rank 1 is silent",
        f"launcher/{LAUNCHER}",
    )


async def test_an_attempts_token_opens_neither_service(yard: Yard) -> None:
    token, _ = yard.tokens.mint("default", "job", "attempt", 1, 60)
    async with connect(f"127.0.0.1:{yard.port}", token) as channel:
        users = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        launchers = scheduler_pb2_grpc.AttemptServiceStub(channel)
        for call in (
            users.ListJobs(s.ListJobsRequest()),
            users.SubmitBatch(s.SubmitBatchRequest()),
            launchers.ClaimAttempt(s.ClaimAttemptRequest(attempt_id="a", launcher_id="l")),
            launchers.ListAssigned(s.ListAssignedRequest()),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            assert refused.value.code() == grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize(
    "resources",
    [{"cpu": float("nan")}, {"cpu": float("inf")}, {"cpu": -1}, {"cpu": 1e300}, {"memory_bytes": -1}, {"gpu": -1}],
)
@pytest.mark.parametrize("field", ["total", "others"])
async def test_machines_with_impossible_resources_are_refused(
    yard: Yard, field: str, resources: dict[str, float]
) -> None:
    machine = s.Machine(name="m0", total=c.Resources(cpu=1, memory_bytes=1))
    getattr(machine, field).CopyFrom(c.Resources(**resources))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await yard.register(machines=[machine])
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert reason_of(refused.value) == "InvalidMachines"


async def test_a_pool_belongs_to_one_living_launcher(yard: Yard) -> None:
    await yard.register()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await yard.register(launcher_id="launcher-2")
    assert reason_of(refused.value) == "PoolTaken"
