"""Series are stitched over attempts, listed, sampled and watched."""

import asyncio
import json

import grpc
import pytest
from servicekit.errors import reason_of
from trainyard_protos.v1 import metrics_pb2 as pb

from services.metrics.tests.metrics_kit import append, open_run, points, refused, run_id, series


@pytest.fixture
def ingestor(each_ingestor):
    """What is in the database is part of every answer here: all tests run on both."""
    return each_ingestor


def rewind(checkpoint="version", **cut):
    return pb.Rewind(checkpoint=checkpoint, cut=cut)


async def steps(stub, **query):
    return list((await series(stub, **query))["loss", 0].step)


async def test_a_resumed_series_has_no_gap_and_no_doubled_step(ingestor):
    stub = ingestor.user()
    await open_run(stub, 1, fence=1)
    await append(stub, points(range(10), writer="first"))
    await open_run(stub, 2, fence=2, rewind=rewind(first=6))
    await append(stub, points(range(6), run=2, writer="second", first_step=6))
    found = (await series(stub))["loss", 0]
    assert list(found.step) == list(range(12))
    assert list(found.attempt) == [1] * 6 + [2] * 6


async def test_hidden_points_stay_stored(ingestor):
    stub = ingestor.user()
    await open_run(stub, 1, fence=1)
    await append(stub, points(range(10), writer="first"))
    await open_run(stub, 2, fence=2, rewind=rewind(first=6))
    assert await steps(stub) == list(range(6))
    assert await steps(stub, include_hidden=True) == list(range(10))


async def test_a_fresh_start_hides_everything_before(ingestor):
    stub = ingestor.user()
    await open_run(stub, 1, fence=1)
    await append(stub, points(range(10), writer="first"))
    await open_run(stub, 2, fence=2, rewind=rewind(checkpoint=""))
    await append(stub, points(range(3), run=2, writer="second"))
    assert await steps(stub) == [0, 1, 2]


async def test_a_rewind_may_follow_the_opening_and_then_stays(ingestor):
    stub = ingestor.user()
    await open_run(stub, 1, fence=1)
    await append(stub, points(range(10), writer="first"))
    await open_run(stub, 2, fence=2)
    assert await steps(stub) == list(range(10))
    await open_run(stub, 2, fence=2, rewind=rewind(first=6))
    await open_run(stub, 2, fence=2, rewind=rewind(first=3))
    await open_run(stub, 2, fence=2)
    assert await steps(stub) == list(range(6))


async def test_an_attempt_that_left_no_checkpoint_is_skipped(ingestor):
    stub = ingestor.user()
    await open_run(stub, 1, fence=1)
    await append(stub, points(range(10), writer="first"))
    await open_run(stub, 2, fence=2, rewind=rewind(first=5))
    await append(stub, points(range(3), run=2, writer="second", first_step=5))
    await open_run(stub, 3, fence=3, rewind=rewind(first=5))
    await append(stub, points(range(3), run=3, writer="third", first_step=5))
    found = (await series(stub))["loss", 0]
    assert list(found.step) == list(range(8))
    assert list(found.attempt) == [1] * 5 + [3] * 3


async def test_a_checkpoint_made_before_the_first_point_names_its_attempt(ingestor):
    stub = ingestor.user()
    await open_run(stub, 1, fence=1)
    await append(stub, points(range(10), writer="first"))
    await open_run(stub, 2, fence=2, rewind=rewind(first=5))
    await open_run(stub, 3, fence=3, rewind=pb.Rewind(checkpoint="version", fence=2))
    assert await steps(stub) == list(range(5))


NODE_1 = {"writer": "other", "rank": 1}
BEYOND_ALL = 10**18


async def steps_of_node_1(stub, *, elsewhere, **written):
    """What stays visible of ten rows when an attempt resumes from a checkpoint that node 0 stored whole."""
    await open_run(stub, 1, fence=1)
    await append(stub, points(range(10), writer="first"), points(range(10), **{**NODE_1, **written}))
    resumed = pb.Rewind(checkpoint="version", cut={"first": 6}, elsewhere=elsewhere)
    await open_run(stub, 2, fence=2, rewind=resumed)
    listed = (await stub.ListSeries(pb.ListSeriesRequest(selector=pb.SeriesSelector(job_id="job")))).series
    found = {key: list(each.step) for key, each in (await series(stub)).items()}
    assert {(info.name, info.rank): info.count for info in listed} == {key: len(of) for key, of in found.items()}
    assert found.pop(("loss", 0)) == list(range(6))
    return next(iter(found.values()), [])


async def test_rows_of_other_nodes_count_up_to_the_step_of_a_checkpoint_stored_whole(ingestor):
    elsewhere = pb.Elsewhere(step=5, until_ns=BEYOND_ALL, ranks=[0])
    assert await steps_of_node_1(ingestor.user(), elsewhere=elsewhere) == list(range(6))


async def test_rows_of_other_nodes_with_steps_of_their_own_count_up_to_its_time(ingestor):
    elsewhere = pb.Elsewhere(step=5_000, until_ns=1003, ranks=[0])
    assert await steps_of_node_1(ingestor.user(), elsewhere=elsewhere) == list(range(4))


@pytest.mark.parametrize(
    "written",
    [{"rank": 0, "name": "late"}, {"writer": "attempt/1/system", "name": "system/cpu"}],
    ids=["a process that began later on the storing node", "what an agent measured"],
)
async def test_who_did_not_train_on_another_node_has_no_row_in_a_checkpoint_that_does_not_name_him(ingestor, written):
    elsewhere = pb.Elsewhere(step=5, until_ns=BEYOND_ALL, ranks=[0])
    assert await steps_of_node_1(ingestor.user(), elsewhere=elsewhere, **written) == []


async def test_a_cut_that_tells_nothing_of_other_nodes_names_all_writers(ingestor):
    assert await steps_of_node_1(ingestor.user(), elsewhere=None) == []


async def test_what_the_agent_measures_is_never_hidden(ingestor):
    stub = ingestor.user()
    await open_run(stub, 1, fence=1)
    await append(stub, points([1, 2], writer="agent", name="system/cpu", rank=-1))
    await open_run(stub, 2, fence=2, rewind=rewind(checkpoint=""))
    assert len((await series(stub))["system/cpu", -1].value) == 2


async def test_a_run_alone_shows_all_of_its_points(ingestor):
    stub = ingestor.user()
    await open_run(stub, 1, fence=1)
    await append(stub, points(range(4), writer="first"))
    await open_run(stub, 2, fence=2, rewind=rewind(checkpoint=""))
    request = pb.QuerySeriesRequest(selector=pb.SeriesSelector(run_id=run_id(1)))
    assert [list(found.step) for found in (await stub.QuerySeries(request)).series] == [[0, 1, 2, 3]]


async def test_a_list_tells_counts_last_values_and_ranges(ingestor):
    stub = ingestor.user()
    await open_run(stub)
    await append(stub, points([3, float("nan"), 1, 2]), points([7], writer="x", rank=1))
    request = pb.ListSeriesRequest(selector=pb.SeriesSelector(job_id="job"))
    first, second = (await stub.ListSeries(request)).series
    assert (first.name, first.rank, first.count, first.last_step, first.last_value) == ("loss", 0, 4, 3, 2)
    assert (first.min_value, first.max_value) == (1, 3)
    assert (second.rank, second.last_value) == (1, 7)


async def test_names_are_chosen_exactly_or_by_glob(ingestor):
    stub = ingestor.user()
    await open_run(stub)
    names = ["train/loss", "val/loss", "val/accuracy"]
    await append(stub, *(points([index], first=index, name=name) for index, name in enumerate(names)))
    assert {name for name, _ in await series(stub, names=["val/*"])} == {"val/loss", "val/accuracy"}
    assert {name for name, _ in await series(stub, names=["train/loss", "nothing"])} == {"train/loss"}


@pytest.mark.parametrize("names", [["*"] * 1001, ["x" * 257]], ids=["too many", "too long"])
async def test_patterns_of_names_are_bounded(ingestor, names):
    stub = ingestor.user()
    await open_run(stub)
    await append(stub, points([1]))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await series(stub, names=names)
    assert reason_of(refused.value) == "TooManyNames"


async def test_a_range_of_steps_is_cut_out(ingestor):
    stub = ingestor.user()
    await open_run(stub)
    await append(stub, points(range(10)))
    assert await steps(stub, from_step=3, to_step=5) == [3, 4, 5]


async def test_sampling_keeps_every_spike(ingestor):
    stub = ingestor.user()
    await open_run(stub)
    values = [0.0] * 10_000
    values[1234], values[8765] = 9.0, -9.0
    await append(stub, points(values))
    found = (await series(stub, max_points=100))["loss", 0]
    assert len(found.value) <= 100
    assert found.total == 10_000
    assert {(1234, 9.0), (8765, -9.0)} <= set(zip(found.step, found.value, strict=True))
    assert list(found.step) == sorted(found.step)


async def test_an_answer_that_would_be_too_large_says_how_to_ask(ingestor):
    await ingestor.restart(max_query_points=10)
    await open_run(ingestor.user())
    await append(ingestor.user(), points(range(11)))
    error = await refused(series(ingestor.user()))
    assert reason_of(error) == "TooManyPoints"
    assert len((await series(ingestor.user(), max_points=10))["loss", 0].value) == 10


async def test_new_points_are_seen_by_a_query_that_comes_after(ingestor):
    stub = ingestor.user()
    await open_run(stub)
    for value in range(5):
        await append(stub, points([value], first=value))
        assert await steps(stub) == list(range(value + 1))


async def test_queries_do_not_depend_on_what_is_cached(ingestor):
    await ingestor.restart(max_cached_bytes=1)
    stub = ingestor.user()
    for number in (1, 2, 3):
        await open_run(stub, number, job=f"job-{number}")
        await append(stub, points([number] * 5, run=number))
    for number in (1, 2, 3, 1):
        assert list((await series(stub, f"job-{number}"))["loss", 0].value) == [number] * 5


async def test_watchers_see_what_is_there_then_what_changes(ingestor):
    stub = ingestor.user()
    await open_run(stub)
    await append(stub, points([1]))
    call = stub.WatchSeries(pb.WatchSeriesRequest(selector=pb.SeriesSelector(job_id="job")))
    assert [(info.name, info.count) for info in (await call.read()).series] == [("loss", 1)]
    await append(stub, points([2, float("nan")], first=1), points([5], writer="v", name="acc"))
    seen = {}
    while seen != {"loss": 3, "acc": 1}:
        seen |= {info.name: info.count for info in (await call.read()).series}
    await open_run(stub, 2, fence=2, rewind=rewind(w=1))
    await append(stub, points([6], run=2, writer="w2", first_step=1))
    while seen["loss"] != 2:
        seen |= {info.name: info.count for info in (await call.read()).series}
    call.cancel()


async def test_many_streams_at_once_lose_and_double_nothing(ingestor):
    stub = ingestor.user()
    await open_run(stub)

    async def write(writer):
        batches = [points([index], first=index, writer=f"w{writer}", rank=writer) for index in range(50)]
        await append(stub, *batches)

    await asyncio.gather(*(write(writer) for writer in range(8)))
    found = await series(stub)
    assert [list(found["loss", rank].value) for rank in range(8)] == [list(range(50))] * 8
    assert ingestor.counted("trainyard_metrics_syncs_total") < 400


async def test_a_new_run_of_a_stale_fence_is_refused(ingestor):
    await open_run(ingestor.attempt(2, fence=2), 2, fence=2)
    error = await refused(open_run(ingestor.attempt(1, fence=1), 1, fence=1))
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.FAILED_PRECONDITION, "StaleFence")


async def test_opening_again_adds_params_and_tags(ingestor):
    stub = ingestor.user()
    await open_run(stub, params='{"lr": 1, "depth": 2}', tags={"a": "1"}, notes="first")
    run = await open_run(stub, params='{"lr": 3}', tags={"b": "2"})
    assert (run.params, dict(run.tags), run.notes) == ('{"lr": 3, "depth": 2}', {"a": "1", "b": "2"}, "first")
    assert [other.id for other in (await stub.ListRuns(pb.ListRunsRequest(job_id="job"))).runs] == [run.id]


@pytest.mark.parametrize("what", ["params", "context", "tags"])
async def test_what_is_added_to_a_run_is_bounded_as_a_whole(ingestor, what):
    stub = ingestor.user()

    async def add(key):
        facts = {key: "x" * 200_000}
        return await open_run(stub, **{what: facts if what == "tags" else json.dumps(facts)})

    kept = await add("0")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        for number in range(1, 64):
            kept = await add(str(number))
    assert reason_of(caught.value) == "TooLarge"
    found = await stub.SearchRuns(pb.SearchRunsRequest(with_context=True))
    assert getattr(found.runs[0].run, what) == getattr(kept, what)


async def test_many_globs_are_refused_before_they_are_compiled(ingestor):
    stub = ingestor.user()
    run = await open_run(stub)
    selector = pb.SeriesSelector(run_id=run.id, names=[f"{number}*" + "a" * 100 for number in range(100)])
    assert reason_of(await refused(stub.ListSeries(pb.ListSeriesRequest(selector=selector)))) == "TooManyNames"


async def test_params_that_are_not_an_object_are_refused(ingestor):
    for params in ("[1]", "{", "3", '{"deep": ' + "[" * 50_000 + "]" * 50_000 + "}"):
        assert reason_of(await refused(open_run(ingestor.user(), params=params))) == "NotAnObject"


async def test_runs_come_in_pages_newest_first(ingestor):
    stub = ingestor.user()
    for number in range(1, 6):
        await open_run(stub, number, job="job", fence=number)
    seen, token = [], ""
    while True:
        page = await stub.ListRuns(pb.ListRunsRequest(job_id="job", page_size=2, page_token=token))
        seen += [run.id for run in page.runs]
        token = page.next_page_token
        if not token:
            break
    assert seen == [run_id(number) for number in (5, 4, 3, 2, 1)]


async def test_removing_a_job_removes_its_records_and_keeps_others(ingestor):
    stub = ingestor.user()
    await open_run(stub, 1)
    await open_run(stub, 2, job="other")
    await append(stub, points([1]), points([2], run=2))
    assert (await stub.DeleteJobRuns(pb.DeleteJobRunsRequest(job_id="job"))).runs == 1
    assert await series(stub) == {}
    assert not ingestor.records(1).parent.exists()
    assert list((await series(stub, "other"))["loss", 0].value) == [2]
    assert (await refused(append(stub, points([1])))).code() == grpc.StatusCode.NOT_FOUND


async def test_a_stream_that_is_open_when_its_run_is_removed_is_told_so(ingestor):
    stub = ingestor.user()
    await open_run(stub)
    call = stub.Append()
    await call.write(points([1]))
    assert (await call.read()).next_seq == 1
    await ingestor.user().DeleteJobRuns(pb.DeleteJobRunsRequest(job_id="job"))
    await call.write(points([2], first=1))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert reason_of(caught.value) == "RunNotFound"


async def test_a_stream_that_is_open_when_the_ingestor_stops_is_told_to_come_back(ingestor):
    stub = ingestor.user()
    await open_run(stub)
    call = stub.Append()
    await call.write(points([1]))
    assert (await call.read()).next_seq == 1
    await ingestor.app.stop()
    await call.write(points([2], first=1))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert (caught.value.code(), reason_of(caught.value)) == (grpc.StatusCode.UNAVAILABLE, "Stopping")
    await ingestor.restart()
    assert await steps(ingestor.user()) == [0]
