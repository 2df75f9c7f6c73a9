"""Who starts, who waits, and what each is told."""

from pathlib import Path

import pytest
from trainyard_protos.v1 import common_pb2 as c
from trainyard_protos.v1 import scheduler_pb2 as s

from services.scheduler.tests.conftest import OpenYard
from services.scheduler.tests.yard import COMPLETED, Clock, Yard, document

GI = 1 << 30


async def pending_of(yard: Yard, job: s.Job) -> s.Pending:
    return (await yard.job(job.id)).pending


async def test_without_machines_a_job_is_told_that_there_are_none(yard: Yard) -> None:
    job = await yard.submit()
    assert job.pending.reason == "NoPool"
    assert "yard up" in job.pending.message


async def test_a_job_that_can_never_fit_is_told_so_with_numbers(yard: Yard) -> None:
    await yard.register(cpu=4)
    job = await yard.submit(document(resources={"cpu": 16, "memory": "1Gi"}))
    assert (job.pending.reason, job.pending.never_fits) == ("NeverFits", True)
    assert "16 cpu" in job.pending.message
    assert "4 cpu" in job.pending.message
    assert "spec.resources" in job.pending.message


def shared_machine(free_cpu: float) -> s.Machine:
    """One of 4 cores, of which others have what is not free."""
    return s.Machine(
        name="m0",
        total=c.Resources(cpu=free_cpu, memory_bytes=8 * GI),
        others=c.Resources(cpu=4 - free_cpu, memory_bytes=GI),
    )


async def test_a_job_whose_room_others_hold_waits_aside_until_they_go(yard: Yard) -> None:
    await yard.register(machines=[shared_machine(1)])
    never = await yard.submit(document("never", resources={"cpu": 5, "memory": "1Gi"}))
    job = await yard.submit(document("large", priority=100, resources={"cpu": 4, "memory": "1Gi"}))
    assert (job.pending.reason, job.pending.never_fits) == ("RoomHeldByOthers", False)
    assert "3 cpu, 1Gi memory, 0 gpu of 'm0'" in job.pending.message
    assert "kubectl describe node m0" in job.pending.message
    assert (await pending_of(yard, never)).message.count("'m0' of pool 'local', has 4 cpu, 9Gi memory") == 1
    explanation = await yard.users.ExplainJob(s.ExplainJobRequest(id="large"))
    assert "large cannot start yet (RoomHeldByOthers)" in explanation.summary
    small = await yard.started((await yard.submit(document("small"))).id)
    await yard.register(machines=[s.Machine(name="m0", total=c.Resources(cpu=4, memory_bytes=9 * GI))])
    assert (await pending_of(yard, job)).reason == "WaitingForCapacity"
    late = await yard.submit(document("late"))
    assert (await pending_of(yard, late)).reason == "BehindOthers"
    await yard.report(small, s.ATTEMPT_PHASE_ENDED, COMPLETED)
    assert (await yard.admitted(job.id)).state == s.JOB_STATE_STARTING
    assert (await pending_of(yard, never)).never_fits


async def test_what_others_hold_is_known_after_a_restart(tmp_path: Path, open_scheduler: OpenYard) -> None:
    clock = Clock()
    async with open_scheduler(tmp_path, clock) as yard:
        await yard.register(machines=[shared_machine(1)])
        job = await yard.submit(document(resources={"cpu": 4, "memory": "1Gi"}))
    async with open_scheduler(tmp_path, clock) as again:
        assert (await pending_of(again, job)).reason == "RoomHeldByOthers"
        [pool] = (await again.users.ListPools(s.ListPoolsRequest())).pools
        assert pool.machines[0].others.cpu == 3


async def test_a_job_that_can_never_fit_blocks_nobody(yard: Yard) -> None:
    await yard.register(cpu=4)
    await yard.submit(document(priority=100, resources={"cpu": 16, "memory": "1Gi"}))
    small = await yard.submit()
    assert (await yard.started(small.id)).state == s.JOB_STATE_RUNNING


async def test_a_job_waits_for_room_and_starts_when_it_is_given_back(yard: Yard) -> None:
    await yard.register(cpu=4)
    first = await yard.started((await yard.submit(document(resources={"cpu": 3, "memory": "1Gi"}))).id)
    second = await yard.submit(document(resources={"cpu": 2, "memory": "1Gi"}))
    assert (await pending_of(yard, second)).reason == "WaitingForCapacity"
    await yard.report(first, s.ATTEMPT_PHASE_ENDED, COMPLETED)
    assert (await yard.admitted(second.id)).state == s.JOB_STATE_STARTING


async def test_nobody_overtakes_the_head_of_the_queue(yard: Yard) -> None:
    await yard.register(cpu=4)
    await yard.started((await yard.submit(document(resources={"cpu": 3, "memory": "1Gi"}))).id)
    big = await yard.submit(document(resources={"cpu": 4, "memory": "1Gi"}))
    small = await yard.submit(document(resources={"cpu": 1, "memory": "1Gi"}))
    behind = await pending_of(yard, small)
    assert behind.reason == "BehindOthers"
    explanation = await yard.users.ExplainJob(s.ExplainJobRequest(id=small.id))
    assert (explanation.position, list(explanation.ahead)) == (2, [big.id])
    assert explanation.free.cpu == 1


async def test_higher_priority_goes_first(yard: Yard) -> None:
    low = await yard.submit(document(priority=1, resources={"cpu": 4, "memory": "1Gi"}))
    high = await yard.submit(document(priority=99, resources={"cpu": 4, "memory": "1Gi"}))
    await yard.register(cpu=4)
    await yard.admitted(high.id)
    assert (await yard.job(low.id)).state == s.JOB_STATE_QUEUED


async def test_a_gang_starts_whole_or_not_at_all(yard: Yard) -> None:
    await yard.register(cpu=4)
    await yard.started((await yard.submit()).id)
    gang = await yard.submit(document(nodes=2, workersPerNode=2))
    assert (await pending_of(yard, gang)).reason == "WaitingForCapacity"
    assert (await yard.job(gang.id)).attempt == 0


async def test_a_job_that_could_never_fit_starts_when_a_larger_machine_comes(yard: Yard) -> None:
    await yard.register(cpu=4)
    job = await yard.submit(document(resources={"cpu": 16, "memory": "1Gi"}))
    await yard.register(cpu=32)
    assert (await yard.admitted(job.id)).state == s.JOB_STATE_STARTING


async def test_a_pool_may_have_no_machine_for_a_while(yard: Yard) -> None:
    await yard.register(machines=[])
    job = await yard.submit()
    assert (job.pending.reason, job.pending.never_fits) == ("NoPool", False)
    assert "no machine of 'local' can be used now" in job.pending.message
    await yard.register()
    await yard.admitted(job.id)


@pytest.mark.parametrize(("cpu", "reason", "position"), [(1, "", 1), (64, "NeverFits", 0)])
async def test_a_plan_says_what_submit_would_do_and_does_nothing(
    yard: Yard, cpu: int, reason: str, position: int
) -> None:
    await yard.register(cpu=4)
    text = document(resources={"cpu": cpu, "memory": "1Gi"}, code={"path": "."})
    plan = await yard.users.Plan(s.PlanRequest(document=s.Document(text=text)))
    assert (plan.pending.reason, plan.position) == (reason, position)
    assert [p.machine for p in plan.placements] == (["m0"] if position else [])
    assert "gracePeriod: 30s" in plan.resolved
    assert not (await yard.users.ListJobs(s.ListJobsRequest())).jobs
