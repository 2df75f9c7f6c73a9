"""Lines of output come back in order, by rank, from the end, and by what they hold."""

from servicekit.errors import reason_of
from trainyard_protos.v1 import metrics_pb2 as pb

from services.metrics.tests.metrics_kit import append, lines, open_run, refused, texts


async def two_nodes(stub):
    """Even times on node 0, odd ones on node 1."""
    await open_run(stub)
    for start in range(0, 20, 10):
        batches = []
        for node in (0, 1):
            batch = lines([], first=start // 2, writer=f"node-{node}")
            for time in range(start + node, start + 10, 2):
                batch.lines.lines.add(seq=time // 2, time_ns=time, rank=node, text=f"line {time}")
            batches.append(batch)
        await append(stub, *batches)


async def test_lines_of_all_nodes_come_in_the_order_of_time(ingestor):
    await two_nodes(ingestor.user())
    assert await texts(ingestor.user()) == [f"line {time}" for time in range(20)]


async def test_a_tail_is_the_same_as_the_end_of_everything(ingestor):
    await two_nodes(ingestor.user())
    everything = await texts(ingestor.user())
    for count in (1, 7, 20, 100):
        assert await texts(ingestor.user(), tail=count) == everything[-count:]


async def test_lines_are_chosen_by_rank_time_and_content(ingestor):
    await two_nodes(ingestor.user())
    assert await texts(ingestor.user(), ranks=[1], from_time_ns=15) == ["line 15", "line 17", "line 19"]
    assert await texts(ingestor.user(), search="1", ranks=[0]) == [f"line {time}" for time in (10, 12, 14, 16, 18)]
    assert await texts(ingestor.user(), search="1", tail=2) == ["line 18", "line 19"]


async def test_attempts_follow_each_other(ingestor):
    stub = ingestor.user()
    await open_run(stub, 1, fence=1)
    await append(stub, lines(["late clock"], first_time=999))
    await open_run(stub, 2, fence=2, rewind=pb.Rewind())
    await append(stub, lines(["second"], run=2))
    assert await texts(stub) == ["late clock", "second"]
    assert await texts(stub, tail=1) == ["second"]
    assert await texts(stub, attempt=1) == ["late clock"]


async def test_lines_and_points_of_one_run_do_not_mix(ingestor):
    from services.metrics.tests.metrics_kit import points, series

    stub = ingestor.user()
    await open_run(stub)
    await append(stub, lines(["a"]), points([1]), lines(["b"], first=1))
    assert await texts(stub) == ["a", "b"]
    assert list((await series(stub))["loss", 0].value) == [1]


async def test_many_lines_come_in_several_answers(ingestor):
    stub = ingestor.user()
    await open_run(stub)
    await append(stub, lines([f"{index}" for index in range(3000)]))
    pages = [page async for page in stub.ReadLogs(pb.ReadLogsRequest(job_id="job"))]
    assert len(pages) > 1
    assert [stored.line.text for page in pages for stored in page.lines] == [f"{index}" for index in range(3000)]


async def test_a_tail_beyond_the_limit_is_refused(ingestor):
    assert reason_of(await refused(texts(ingestor.user(), tail=10**9))) == "BadTail"
