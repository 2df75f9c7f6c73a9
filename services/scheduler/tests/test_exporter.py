"""What Prometheus is shown of queues, machines and ends."""

from pathlib import Path

from trainyard_protos.v1 import scheduler_pb2 as s

from services.scheduler.tests.conftest import OpenYard
from services.scheduler.tests.yard import COMPLETED, Clock, Yard, document, exit_of


def shown(yard: Yard, name: str, **labels: str) -> float | None:
    return yard.registry.get_sample_value(name, labels)


def waiting(yard: Yard, what: str, queue: str = "default") -> float | None:
    return shown(yard, "trainyard_queue_jobs", queue=queue, waits_for=what)


async def test_queued_jobs_are_shown_by_queue_and_by_what_they_wait_for(yard: Yard) -> None:
    await yard.register(cpu=1)
    assert [waiting(yard, what) for what in ("room", "backoff", "others", "larger pool")] == [0, 0, 0, 0]
    await yard.started((await yard.submit()).id)
    await yard.submit()
    await yard.submit(document(queue="nightly"))
    await yard.submit(document(resources={"cpu": 99, "memory": "1Gi"}))
    assert (waiting(yard, "room"), waiting(yard, "room", "nightly"), waiting(yard, "larger pool")) == (1, 1, 1)


async def test_how_long_the_oldest_job_waits_for_room_is_shown(tmp_path: Path, open_scheduler: OpenYard) -> None:
    clock = Clock()
    async with open_scheduler(tmp_path, clock) as yard:
        await yard.register(cpu=1)
        first = await yard.started((await yard.submit()).id)
        await yard.submit()
        clock.now_ns += 90 * 10**9
        await yard.submit()
        assert shown(yard, "trainyard_queue_oldest_seconds", queue="default") == 90
    async with open_scheduler(tmp_path, clock) as again:
        clock.now_ns += 10 * 10**9
        assert shown(again, "trainyard_queue_oldest_seconds", queue="default") == 100
        assert (await again.job(first.id)).state == s.JOB_STATE_RUNNING


async def test_machines_and_what_is_free_of_them_are_shown(yard: Yard) -> None:
    await yard.register(cpu=4, memory_gi=8, gpu=2)
    await yard.admitted((await yard.submit(document(resources={"cpu": 1, "memory": "1Gi", "gpu": 1}))).id)
    machine = {"pool": "local", "machine": "m0"}
    assert shown(yard, "trainyard_pool_alive", pool="local") == 1
    for resource, total, free in (("cpu", 4, 3), ("memory", 8 << 30, 7 << 30), ("gpu", 2, 1)):
        assert shown(yard, "trainyard_machine_capacity", resource=resource, **machine) == total
        assert shown(yard, "trainyard_machine_free", resource=resource, **machine) == free


async def test_ends_are_counted_by_reason_and_by_whether_anything_ran(yard: Yard) -> None:
    await yard.register(cpu=4)

    def ended(reason: str, ran: str) -> float | None:
        return shown(yard, "trainyard_attempts_ended_total", pool="local", reason=reason, ran=ran)

    assert (ended("StartFailed", "no"), ended("Completed", "yes")) == (0, 0)
    await yard.ended((await yard.submit()).id, COMPLETED)
    refused = await yard.admitted((await yard.submit()).id)
    await yard.claim(refused)
    await yard.report(refused, s.ATTEMPT_PHASE_ENDED, exit_of("StartFailed"))
    await yard.ended((await yard.submit()).id, exit_of("SomethingNew"))
    assert (ended("Completed", "yes"), ended("StartFailed", "no"), ended("Other", "yes")) == (1, 1, 1)
    assert shown(yard, "trainyard_jobs_ended_total", state="succeeded") == 1
    assert shown(yard, "trainyard_jobs_ended_total", state="failed") == 2
    assert shown(yard, "trainyard_admissions_total") == 3
