"""An attempt that is over stores nothing more; what it left is delivered for it."""

import grpc
import pytest
from trainyard_protos.v1 import metrics_pb2 as pb

from services.metrics.tests.metrics_kit import append, lines, open_run, points, refused, run_id, series, texts
from services.metrics.tests.test_metrics_append import reason_of


async def close(ingestor, number=1, *, job="job", fence=1, undelivered=()):
    request = pb.CloseAttemptRequest(
        job_id=job, attempt_id=run_id(number), fence=fence, undelivered_writers=list(undelivered)
    )
    await ingestor.user().CloseAttempt(request)


async def test_the_token_of_an_attempt_that_is_over_stores_nothing(each_ingestor):
    stub = each_ingestor.attempt(1)
    await open_run(stub)
    await append(stub, points([1.0]))
    await close(each_ingestor)
    for call in (open_run(stub), append(stub, points([2.0], first=1)), stub.GetPosition(position())):
        assert reason_of(await refused(call)) == "AttemptEnded"
    assert list((await series(each_ingestor.user()))["loss", 0].value) == [1.0]


async def test_a_stream_that_is_open_takes_nothing_more_once_its_attempt_is_over(ingestor):
    stub = ingestor.attempt(1)
    await open_run(stub)
    stream = stub.Append()
    await stream.write(points([1.0]))
    assert (await stream.read()).next_seq == 1
    await close(ingestor)
    await stream.write(points([2.0], first=1))
    assert reason_of(await refused(stream.read())) == "AttemptEnded"
    assert list((await series(ingestor.user()))["loss", 0].value) == [1.0]


async def test_the_end_of_an_attempt_closes_the_open_streams_of_earlier_ones_too(ingestor):
    streams = []
    for number in (1, 2, 3):
        await open_run(ingestor.attempt(number, fence=number), number, fence=number)
        streams.append(ingestor.attempt(number, fence=number).Append())
        await streams[-1].write(points([1.0], run=number))
        assert (await streams[-1].read()).next_seq == 1
    await close(ingestor, 2, fence=2)
    for number in (1, 2):
        await streams[number - 1].write(points([2.0], first=1, run=number))
        assert reason_of(await refused(streams[number - 1].read())) == "AttemptEnded"
    await streams[2].write(points([2.0], first=1, run=3))
    assert (await streams[2].read()).next_seq == 2


async def test_a_later_attempt_goes_on(ingestor):
    await open_run(ingestor.attempt(1))
    await close(ingestor)
    stub = ingestor.attempt(2, fence=2)
    await open_run(stub, 2, fence=2)
    assert await append(stub, points([1.0], run=2)) == {"w": 1}


async def test_an_attempt_closes_nothing(ingestor):
    error = await refused(ingestor.attempt(1).CloseAttempt(pb.CloseAttemptRequest()))
    assert reason_of(error) == "UserOnly"


async def test_what_was_undelivered_is_delivered_after_the_end(each_ingestor):
    """Also when metrics never heard of the attempt, and a later one has begun since."""
    await close(each_ingestor, undelivered=["w", "node-0"])
    later = each_ingestor.attempt(2, fence=2)
    await open_run(later, 2, fence=2, rewind=pb.Rewind())
    await append(later, points([5.0], run=2))
    delivery = each_ingestor.attempt(1, delivery=True)
    await open_run(delivery, params='{"lr": 1}')
    assert await append(delivery, points([1.0]), lines(["one", "two"])) == {"w": 1, "node-0": 2}
    user = each_ingestor.user()
    assert await texts(user, attempt=1) == ["one", "two"]
    assert [point.value for point in (await series(user)).values()] == [[5.0]]
    runs = {run.fence: run for run in (await user.ListRuns(pb.ListRunsRequest(job_id="job"))).runs}
    assert runs[1].params == '{"lr": 1}'
    newest = (await user.SearchRuns(pb.SearchRunsRequest())).runs
    assert [found.run.fence for found in newest] == [2]


async def test_what_a_dead_agent_left_is_delivered_before_the_end_is_told(ingestor):
    await open_run(ingestor.attempt(1))
    delivery = ingestor.attempt(1, delivery=True)
    await open_run(delivery)
    assert await append(delivery, points([1.0])) == {"w": 1}


async def test_a_delivery_takes_writers_that_were_named_alone(ingestor):
    await close(ingestor, undelivered=["w"])
    delivery = ingestor.attempt(1, delivery=True)
    await open_run(delivery)
    assert reason_of(await refused(append(delivery, points([1.0], writer="other")))) == "NotGranted"
    await open_run(ingestor.user(), 7, job="else")
    for call in (append(delivery, points([1.0], run=7)), open_run(delivery, 7), series(delivery), later(delivery)):
        assert (await refused(call)).code() == grpc.StatusCode.PERMISSION_DENIED


async def test_a_delivery_that_is_done_is_closed_too(ingestor):
    await close(ingestor, undelivered=["w"])
    delivery = ingestor.attempt(1, delivery=True)
    await open_run(delivery)
    stream = delivery.Append()
    await stream.write(points([1.0]))
    assert (await stream.read()).next_seq == 1
    await close(ingestor)
    await stream.write(points([2.0], first=1))
    assert reason_of(await refused(stream.read())) == "NotGranted"
    assert reason_of(await refused(open_run(delivery))) == "NotGranted"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"attempt_id": "../up", "job_id": "job", "fence": 1}, "BadRunId"),
        ({"attempt_id": run_id(1), "fence": 1}, "BadAttempt"),
        ({"attempt_id": run_id(1), "job_id": "job", "fence": -1}, "BadAttempt"),
        (
            {"attempt_id": run_id(1), "job_id": "job", "fence": 1, "undelivered_writers": ["w"] * 10_001},
            "TooManyWriters",
        ),
    ],
)
async def test_what_is_no_attempt_is_not_closed(ingestor, fields, reason):
    error = await refused(ingestor.user().CloseAttempt(pb.CloseAttemptRequest(**fields)))
    assert reason_of(error) == reason


def position():
    return pb.GetPositionRequest(run_id=run_id(1), writer_id="w")


def later(stub):
    return stub.CloseAttempt(pb.CloseAttemptRequest())


async def test_nothing_of_a_removed_job_is_taken_any_more(ingestor):
    """Neither from an attempt nor from a launcher that comes back late with what it has to deliver."""
    await open_run(ingestor.attempt(1))
    await ingestor.user().DeleteJobRuns(pb.DeleteJobRunsRequest(job_id="job"))
    await close(ingestor, undelivered=["w"])
    for call, reason in (
        (open_run(ingestor.attempt(1)), "AttemptEnded"),
        (open_run(ingestor.attempt(2, fence=2), 2, fence=2), "AttemptEnded"),
        (open_run(ingestor.attempt(1, delivery=True)), "NotGranted"),
    ):
        assert reason_of(await refused(call)) == reason
    assert not (await ingestor.user().ListRuns(pb.ListRunsRequest(job_id="job"))).runs


async def test_jobs_are_listed_with_the_database_that_their_tokens_name(each_ingestor):
    """One by one; not in the list are jobs whose token names none, runs of users and runs of plain processes."""
    await open_run(each_ingestor.attempt(1, job="a", database="d1"), 1, job="a")
    await open_run(each_ingestor.attempt(2, job="a", fence=2, database="d1"), 2, job="a", fence=2)
    await open_run(each_ingestor.attempt(3, job="b", database="d2"), 3, job="b")
    await open_run(each_ingestor.attempt(4, job="c"), 4, job="c")
    user = each_ingestor.user()
    await open_run(user, 5, job="d")
    await open_run(user, 6, job="", fence=0)
    found, request = [], pb.ListJobsWithRunsRequest(page_size=1)
    while True:
        page = await user.ListJobsWithRuns(request)
        found += [(job.workspace, job.id, job.database_id) for job in page.jobs]
        if not page.next_page_token:
            break
        request.page_token = page.next_page_token
    assert found == [("default", "a", "d1"), ("default", "b", "d2")]
    assert reason_of(await refused(each_ingestor.attempt(1).ListJobsWithRuns(request))) == "UserOnly"
