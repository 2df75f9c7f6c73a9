"""Lines of output come back in order, by rank, from the end, and by what they hold."""

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servicekit.errors import reason_of
from trainyard_metrics import lines as log_lines
from trainyard_metrics.domain.lines import LineFilter, matcher
from trainyard_protos.v1 import metrics_pb2 as pb
from trainyard_protos.v1.common_pb2 import LogLine

from services.metrics.tests.metrics_kit import append, lines, open_run, refused, run_id, texts


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


async def test_lines_are_searched_by_pattern(ingestor):
    await two_nodes(ingestor.user())
    assert await texts(ingestor.user(), regex=r"line 1[02]$") == ["line 10", "line 12"]
    assert await texts(ingestor.user(), regex="[0-4]$", search="1", tail=2) == ["line 13", "line 14"]


@pytest.mark.parametrize("pattern", ["(", "(?<=a)b", r"(a)\1", "x" * 2000])
async def test_a_pattern_that_is_not_one_is_refused(ingestor, pattern):
    error = await refused(texts(ingestor.user(), regex=pattern))
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.INVALID_ARGUMENT, "BadRegex")


async def test_lines_of_a_plain_process_are_read_by_its_run(ingestor):
    stub = ingestor.user()
    await open_run(stub, 1, job="", fence=0)
    await append(stub, lines(["of the first"]))
    await open_run(stub, 2, job="", fence=0)
    await append(stub, lines(["of the second"], run=2))
    assert await texts(stub, job="", run_id=run_id(2)) == ["of the second"]


async def test_logs_are_of_a_job_or_of_a_run(ingestor):
    for question in ({"job": ""}, {"job": "job", "run_id": run_id(1)}):
        assert reason_of(await refused(texts(ingestor.user(), **question))) == "BadSelector"


def stored_lines(texts_by_time):
    """A snapshot that has these lines, for what reads snapshots."""

    class Stored:
        def keyed_lines(self, wanted=None, *, after=None, backwards=False):
            accepts = matcher(wanted or LineFilter())
            found = [
                ((t, "", i), LogLine(seq=i, time_ns=t, text=x))
                for i, (t, x) in enumerate(texts_by_time)
                if accepts(LogLine(time_ns=t, text=x)) and (after is None or (t, "", i) > after)
            ]
            return iter(found[::-1] if backwards else found)

    return Stored()


attempts = st.lists(
    st.lists(st.tuples(st.integers(0, 5), st.text("ab", max_size=3)), max_size=8).map(
        lambda found: sorted(found, key=lambda line: line[0])
    ),
    max_size=3,
)


@settings(deadline=None)
@given(
    logs=attempts,
    count=st.integers(1, 12),
    room=st.sampled_from([0, 70, 200, 10**6]),
    search=st.sampled_from(["", "a"]),
)
def test_a_tail_is_the_end_of_everything_however_little_is_kept_in_memory(logs, count, room, search):
    sources = [(number, stored_lines(found)) for number, found in enumerate(logs, start=1)]
    wanted = LineFilter(search=search)
    everything = list(log_lines.every(sources, wanted))
    assert list(log_lines.last(sources, wanted, count, room)) == everything[-count:]


async def test_a_reader_who_does_not_read_holds_up_nobody(ingestor):
    await ingestor.restart(query_threads=1)
    stub = ingestor.user()
    await open_run(stub)
    text = "x" * 10_000
    for first in range(0, 5000, 100):
        await append(stub, lines([text] * 100, first=first))
    stuck = [stub.ReadLogs(pb.ReadLogsRequest(job_id="job")) for _ in range(8)]
    for call in stuck:
        assert (await call.read()).lines
    assert await append(stub, lines(["the last"], first=5000)) == {"node-0": 5001}
    assert await texts(ingestor.user(), tail=1) == ["the last"]
    for call in stuck:
        call.cancel()
