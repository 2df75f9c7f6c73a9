"""From submission to an end, over gRPC."""

import json

from trainyard_protos.v1 import scheduler_pb2 as s

from services.scheduler.tests.yard import COMPLETED, Yard, document


async def test_a_job_goes_through_its_states_and_every_change_is_an_event(yard: Yard) -> None:
    await yard.register()
    job = await yard.submit()
    assert job.state == s.JOB_STATE_QUEUED
    running = await yard.started(job.id)
    assert running.state == s.JOB_STATE_RUNNING
    await yard.report(running, s.ATTEMPT_PHASE_FINISHING, COMPLETED)
    assert (await yard.job(job.id)).state == s.JOB_STATE_FINALIZING
    await yard.report(running, s.ATTEMPT_PHASE_ENDED, COMPLETED)
    done = await yard.job(job.id)
    assert (done.state, done.reason) == (s.JOB_STATE_SUCCEEDED, "Completed")
    assert [event.type for event in await yard.events(job.id)] == [
        "Submitted",
        "Admitted",
        "Claimed",
        "Running",
        "Finalizing",
        "Succeeded",
    ]
    assert done.event_seq == (await yard.events(job.id))[-1].seq


async def test_a_claim_returns_what_the_launcher_needs(yard: Yard) -> None:
    await yard.register()
    job = await yard.admitted((await yard.submit(document(nodes=2, deadline="1h"))).id)
    assignment = (await yard.claim(job)).assignment
    assert json.loads(assignment.spec)["spec"]["nodes"] == 2
    assert [(p.node, p.machine) for p in assignment.placements] == [(0, "m0"), (1, "m0")]
    assert (assignment.fence, assignment.pool) == (1, "local")
    assert assignment.deadline_ns > job.created_ns
