"""Machines with labels and taints, pods that find no room, and pools that grow. The clock stands still until moved."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from servicekit.errors import reason_of
from trainyard_protos.v1 import common_pb2 as c
from trainyard_protos.v1 import scheduler_pb2 as s

from services.scheduler.tests.conftest import OpenYard
from services.scheduler.tests.yard import COMPLETED, Clock, Yard, document, exit_of

GI = 1 << 30
TIMEOUT_S = 900
WHOLE = {"cpu": 8, "memory": "1Gi"}  # a machine of the kind


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def yard(tmp_path: Path, open_scheduler: OpenYard, clock: Clock) -> AsyncIterator[Yard]:
    async with open_scheduler(tmp_path, clock=clock) as opened:
        yield opened


def size(cpu: float) -> c.Resources:
    return c.Resources(cpu=cpu, memory_bytes=64 * GI)


def machine(name: str, cpu: float = 8, **labels: str) -> s.Machine:
    return s.Machine(name=name, total=size(cpu), labels={"host": name} | labels)


def kind(*there: str, most: int = 2, **fields: Any) -> s.MachineKind:
    labels = {"kind": "large"}
    return s.MachineKind(
        name="large", max=most, total=size(8), labels=labels, machines=there, provision_timeout_s=TIMEOUT_S, **fields
    )


async def announce(yard: Yard, *machines: s.Machine, **fields: Any) -> None:
    await yard.register(machines=machines, lease_s=3600.0, **fields)


async def grows(yard: Yard, *there: str, most: int = 2) -> None:
    """Announces a machine that is always there, and a kind with these."""
    large = [machine(name, kind="large") for name in there]
    await announce(yard, machine("small", 1), *large, kinds=[kind(*there, most=most)])


async def submitted(yard: Yard, name: str = "big", **spec: Any) -> s.Job:
    return await yard.submit(document(name, **{"resources": WHOLE, **spec}))


async def placed(yard: Yard, job: s.Job, *machines: str) -> None:
    """The launcher says where the cluster put the nodes, "" for one that has no machine."""
    where = [s.Placement(node=node, machine=name) for node, name in enumerate(machines) if name]
    await yard.report(job, s.ATTEMPT_PHASE_UNSPECIFIED, placements=where)


async def explained(yard: Yard, job: s.Job) -> str:
    return (await yard.users.ExplainJob(s.ExplainJobRequest(id=job.id))).summary


def machines_of(job: s.Job) -> list[str]:
    return [each.machine for each in job.attempts[-1].placements]


# Labels, taints, room


async def test_what_agents_take_is_part_of_what_is_admitted(yard: Yard) -> None:
    overhead = c.Resources(cpu=0.05, memory_bytes=96 << 20, pods=1)
    await announce(
        yard, s.Machine(name="m", total=c.Resources(cpu=2, memory_bytes=8 * GI, pods=110)), overhead=overhead
    )
    jobs = [await submitted(yard, f"j{i}", resources={"cpu": "100m", "memory": "64Mi"}) for i in range(20)]
    await yard.admitted(jobs[12].id)
    states = [(await yard.job(job.id)).state for job in jobs]
    assert states == [s.JOB_STATE_STARTING] * 13 + [s.JOB_STATE_QUEUED] * 7
    pending = (await yard.job(jobs[13].id)).pending
    assert pending.reason == "WaitingForCapacity"
    assert "0.05 cpu, 96Mi memory, 0 gpu for the agent of each" in pending.message
    assert "'m' has 0.05 cpu" in pending.message


@pytest.mark.parametrize(
    ("wished", "says"),
    [
        ({"nodeSelector": {"gpu": "h100"}}, "no machine has gpu=h100. Change spec.kubernetes.nodeSelector"),
        ({"nodeSelector": {"gpu": "a100"}}, "taints that it does not tolerate: team=x:NoSchedule"),
    ],
)
async def test_a_job_that_no_machine_takes_is_told_which_label_or_taint_it_is(
    yard: Yard, wished: dict[str, Any], says: str
) -> None:
    taint = s.Taint(key="team", value="x", effect="NoSchedule")
    tainted = s.Machine(name="m", total=size(8), labels={"gpu": "a100"}, taints=[taint])
    await announce(yard, tainted, machine("other"))
    job = await submitted(yard, kubernetes=wished)
    assert (job.pending.reason, job.pending.never_fits) == ("NeverFits", True)
    assert says in job.pending.message
    tolerates = {"tolerations": [{"key": "team", "operator": "Exists"}]}
    if "a100" in says or "team" in says:
        other = await submitted(yard, kubernetes=wished | tolerates)
        assert machines_of(await yard.admitted(other.id)) == ["m"]


async def test_a_machine_that_cannot_be_used_now_makes_no_job_a_mistake(yard: Yard) -> None:
    await announce(yard, machine("small", 1), unusable_machines=[machine("large")])
    job = await submitted(yard)
    assert (job.pending.reason, job.pending.never_fits) == ("NoPool", False)
    assert "when 'large' of pool 'local' can be used again" in job.pending.message


async def test_a_job_that_found_no_room_keeps_its_place_and_its_retries_and_goes_elsewhere(yard: Yard) -> None:
    await announce(yard, machine("one"), machine("two"))
    first, second = [await yard.started((await submitted(yard, name)).id) for name in ("first", "second")]
    third = await submitted(yard, "third")
    await yard.report(first, s.ATTEMPT_PHASE_ENDED, exit_of("Unschedulable", message="0/2 nodes", node=0))
    job = await yard.job(first.id)
    assert (job.state, job.retries_used, job.free_retries_used) == (s.JOB_STATE_QUEUED, 0, 0)
    assert list((await yard.users.ExplainJob(s.ExplainJobRequest(id=third.id))).ahead) == [first.id]
    await yard.report(second, s.ATTEMPT_PHASE_ENDED, COMPLETED)
    assert machines_of(await yard.admitted(first.id)) == ["two"]
    assert machines_of(await yard.admitted(third.id)) == ["one"]


async def test_machines_that_did_not_take_a_job_are_tried_again_after_a_while(yard: Yard, clock: Clock) -> None:
    await announce(yard, machine("one"))
    job = await submitted(yard)
    for attempt in range(1, 12):  # more often than a job may be retried for nothing
        admitted = await yard.admitted(job.id)
        assert admitted.attempt == attempt
        await yard.claim(admitted)
        await yard.report(admitted, s.ATTEMPT_PHASE_ENDED, exit_of("Unschedulable", node=0))
        pending = (await yard.job(job.id)).pending
        assert pending.reason == "Backoff"
        assert "avoids 'one', where its last attempt got or kept no place, for another 5 min" in pending.message
        yard.move(clock, 300)


async def test_a_job_whose_machine_was_taken_away_goes_elsewhere_before_its_launcher_announces_that(
    yard: Yard, clock: Clock
) -> None:
    await announce(yard, machine("one"), machine("two"))
    job = await yard.started((await submitted(yard, retries={"backoff": "0s"})).id)
    await yard.report(job, s.ATTEMPT_PHASE_ENDED, exit_of("NodeLost", node=0))
    assert machines_of(await yard.started(job.id)) == ["two"]
    await yard.report(await yard.job(job.id), s.ATTEMPT_PHASE_ENDED, exit_of("Evicted", node=0))
    assert (await yard.job(job.id)).pending.reason == "Backoff"
    yard.move(clock, 30)
    assert machines_of(await yard.started(job.id)) == ["one"]
    await yard.report(await yard.job(job.id), s.ATTEMPT_PHASE_ENDED, exit_of("NodeLost", node=0))
    assert machines_of(await yard.admitted(job.id)) == ["two"]  # is not avoided any more, either


# Pools that grow


async def test_a_job_that_no_machine_holds_is_admitted_onto_one_that_is_still_to_be_made(
    yard: Yard, clock: Clock
) -> None:
    await grows(yard)
    job = await yard.admitted((await submitted(yard)).id)
    assert job.state == s.JOB_STATE_STARTING
    assert job.pending.reason == "WaitingForMachines"
    [event] = [each for each in await yard.events(job.id) if each.type == "Admitted"]
    assert event.message == "on 1 new machine of kind 'large'"
    assignment = (await yard.claim(job)).assignment
    assert [(each.node, each.kind) for each in assignment.placements] == [(0, "large")]
    yard.move(clock, 300)
    summary = await explained(yard, job)
    assert "WaitingForMachines: pool 'local' has to grow: it waits with 1 of 1 nodes" in summary
    assert "kind 'large'; 10 min left" in summary
    await placed(yard, job, "l1")
    await grows(yard, "l1")
    await yard.report(job, s.ATTEMPT_PHASE_STARTED)
    running = await yard.job(job.id)
    assert (running.state, machines_of(running)) == (s.JOB_STATE_RUNNING, ["l1"])
    yard.move(clock, TIMEOUT_S)
    assert (await yard.job(job.id)).state == s.JOB_STATE_RUNNING


async def test_a_kind_that_never_grows_gives_the_job_back_and_is_left_alone_for_a_while(
    yard: Yard, clock: Clock
) -> None:
    await grows(yard)
    job = await yard.admitted((await submitted(yard)).id)
    await yard.claim(job)
    late = await yard.admitted((await submitted(yard, "late", resources={"cpu": 1, "memory": "1Gi"})).id)
    assert machines_of(late) == ["small"]  # while the other waits
    yard.move(clock, TIMEOUT_S)
    event = await yard.until(job.id, "Requeued")
    assert event.reason == "Unschedulable"
    assert "1 of 1 nodes had no machine of kind 'large' after 900 s" in event.message
    waits = await yard.job(job.id)
    assert (waits.state, waits.retries_used, waits.free_retries_used) == (s.JOB_STATE_QUEUED, 0, 0)
    assert (waits.pending.reason, waits.pending.never_fits) == ("WaitingForMachines", False)
    assert "tried again in 10 min" in waits.pending.message
    assert (await yard.claim(job)).stale
    assert (await yard.message("pool.local.stop", "attempt_id", job.attempt_id))["fence"] == 1
    younger = await submitted(yard, "younger")
    yard.move(clock, 599)
    assert (await yard.job(job.id)).state == s.JOB_STATE_QUEUED
    yard.move(clock, 1)
    again = await yard.admitted(job.id)
    assert (again.attempt, (await yard.admitted(younger.id)).attempt) == (2, 1)
    order = [each.object_id for each in await yard.events() if each.type == "Admitted"]
    assert order[-2:] == [job.id, younger.id]


async def test_a_job_that_waits_for_a_machine_while_its_kind_is_left_alone_is_told_so(yard: Yard, clock: Clock) -> None:
    await grows(yard)
    first = await yard.admitted((await submitted(yard, "first")).id)
    yard.move(clock, TIMEOUT_S)
    await yard.until(first.id, "Requeued")
    await grows(yard, "l1")  # it came late
    assert machines_of(await yard.admitted(first.id)) == ["l1"]
    waits = await submitted(yard, "second")
    assert (waits.state, waits.pending.reason) == (s.JOB_STATE_QUEUED, "WaitingForCapacity")
    assert "kind 'large' is tried again in 10 min" in waits.pending.message


async def test_the_deadline_of_a_job_does_not_count_the_time_in_which_it_waits_for_machines(
    yard: Yard, clock: Clock
) -> None:
    await grows(yard)
    job = await yard.admitted((await submitted(yard, deadline="10m")).id)
    assert (await yard.claim(job)).assignment.deadline_ns == 0
    yard.move(clock, TIMEOUT_S)
    await yard.until(job.id, "Requeued")
    yard.move(clock, 600)
    again = await yard.admitted(job.id)
    await yard.claim(again)
    yard.move(clock, 800)
    await placed(yard, again, "l1")
    yard.move(clock, 599)
    assert (await yard.job(job.id)).state == s.JOB_STATE_STARTING
    yard.move(clock, 1)
    assert (await yard.until(job.id, "Stopping")).reason == "DeadlineExceeded"


async def test_a_job_that_found_no_room_has_all_of_its_deadline_left(yard: Yard, clock: Clock) -> None:
    await announce(yard, machine("one"))
    job = await yard.admitted((await submitted(yard, deadline="10m")).id)
    await yard.claim(job)
    await yard.report(job, s.ATTEMPT_PHASE_ENDED, exit_of("Unschedulable", node=0))
    yard.move(clock, 300)
    assignment = (await yard.claim(await yard.admitted(job.id))).assignment
    assert assignment.deadline_ns == clock.now_ns + 600_000_000_000


async def test_a_kind_that_grows_to_half_a_gang_gives_the_whole_gang_back(yard: Yard, clock: Clock) -> None:
    await grows(yard)
    gang = await yard.admitted((await submitted(yard, nodes=2)).id)
    await yard.claim(gang)
    await placed(yard, gang, "l1")
    await grows(yard, "l1")
    waits = await yard.job(gang.id)
    assert machines_of(waits) == ["l1", "large#2"]
    assert "1 of 2 nodes for a machine of kind 'large'" in waits.pending.message
    other = await submitted(yard, "other")
    assert other.pending.reason == "WaitingForCapacity"  # both machines are the gang's
    yard.move(clock, TIMEOUT_S)
    await yard.until(gang.id, "Requeued")
    assert machines_of(await yard.admitted(other.id)) == ["l1"]  # what came is there for others
    assert (await yard.job(gang.id)).pending.reason == "WaitingForMachines"


async def test_two_jobs_for_the_last_machine_are_not_both_admitted(yard: Yard) -> None:
    await grows(yard, most=1)
    first, second = await submitted(yard, "first"), await submitted(yard, "second")
    await yard.claim(await yard.admitted(first.id))
    waits = await yard.job(second.id)
    assert (waits.state, waits.pending.reason) == (s.JOB_STATE_QUEUED, "WaitingForCapacity")
    assert "all 1 machines of kind 'large' are taken" in waits.pending.message
    # At no moment between the machine's birth and the launcher's word on it.
    await grows(yard, "l1", most=1)
    assert (await yard.job(second.id)).state == s.JOB_STATE_QUEUED
    await placed(yard, await yard.job(first.id), "l1")
    assert (await yard.job(second.id)).state == s.JOB_STATE_QUEUED
    await yard.report(await yard.job(first.id), s.ATTEMPT_PHASE_ENDED, COMPLETED)
    assert machines_of(await yard.admitted(second.id)) == ["l1"]


async def test_a_machine_that_the_cluster_has_before_it_is_announced_counts_once(yard: Yard) -> None:
    await grows(yard, most=2)
    first = await yard.admitted((await submitted(yard, "first")).id)
    await yard.claim(first)
    await placed(yard, first, "l1")  # not announced yet
    second = await yard.admitted((await submitted(yard, "second")).id)
    third = await submitted(yard, "third")
    assert third.pending.reason == "WaitingForCapacity"
    await grows(yard, "l1", most=2)
    assert machines_of(second) == ["large#1"]
    assert (await yard.job(third.id)).state == s.JOB_STATE_QUEUED


async def test_no_pool_grows_for_a_job_that_fits_a_machine_of_another_pool(yard: Yard) -> None:
    await grows(yard)
    await announce(yard, machine("there"), pool="other", launcher_id="launcher-2")
    assert machines_of(await yard.admitted((await submitted(yard, "first")).id)) == ["there"]
    assert machines_of(await yard.admitted((await submitted(yard, "second")).id)) == ["large#1"]


async def test_the_name_of_a_promised_machine_that_came_is_promised_to_no_other_job(yard: Yard) -> None:
    await grows(yard, most=2)
    first = await yard.admitted((await submitted(yard, "first")).id)
    await yard.claim(first)
    await grows(yard, "l1", most=2)  # the launcher has not reported the first job's pod there yet
    second = await yard.admitted((await submitted(yard, "second")).id)
    assert machines_of(second) == ["large#2"]
    third = await submitted(yard, "third")
    assert third.pending.reason == "WaitingForCapacity"
    await placed(yard, first, "l1")
    assert (await yard.job(third.id)).state == s.JOB_STATE_QUEUED


async def test_small_jobs_share_a_machine_that_is_still_to_be_made(yard: Yard) -> None:
    await grows(yard, most=1)
    half = {"cpu": 4, "memory": "1Gi"}
    jobs = [await submitted(yard, f"j{i}", resources=half) for i in range(3)]
    assert [machines_of(await yard.admitted(job.id)) for job in jobs[:2]] == [["large#1"]] * 2
    assert (await yard.job(jobs[2].id)).state == s.JOB_STATE_QUEUED


async def test_what_waits_for_machines_and_what_is_left_alone_are_known_after_a_restart(
    tmp_path: Path, open_scheduler: OpenYard
) -> None:
    clock = Clock()
    async with open_scheduler(tmp_path, clock) as yard:
        await grows(yard)
        job = await yard.admitted((await submitted(yard)).id)
        await yard.claim(job)
        yard.move(clock, 60)
    async with open_scheduler(tmp_path, clock) as yard:
        assert "14 min left" in await explained(yard, job)
        yard.move(clock, TIMEOUT_S - 60)
        await yard.until(job.id, "Requeued")
    async with open_scheduler(tmp_path, clock) as yard:
        waits = await yard.job(job.id)
        assert (waits.state, waits.pending.reason) == (s.JOB_STATE_QUEUED, "WaitingForMachines")
        [pool] = (await yard.users.ListPools(s.ListPoolsRequest())).pools
        assert pool.kinds[0].blocked_until_ns == clock.now_ns + 600_000_000_000


@pytest.mark.parametrize("wrong", [{"max": 0}, {"name": "a#1"}, {"provision_timeout_s": 0}])
async def test_a_kind_that_cannot_be_is_refused(yard: Yard, wrong: dict[str, Any]) -> None:
    request = kind()
    for field, value in wrong.items():
        setattr(request, field, value)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await announce(yard, kinds=[request])
    assert reason_of(refused.value) == "InvalidKinds"
