"""Summaries say what the points say, after any sequence of writes, rewinds, late points and crashes."""

import asyncio
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from servicekit.errors import DataLoss
from trainyard_metrics import summary_rows
from trainyard_metrics.domain.columns import decode, join
from trainyard_metrics.domain.summary import BadSummary, Packed, Summary
from trainyard_protos.v1 import metrics_pb2 as pb

from scripts.testbed.patience import PATIENCE_S
from services.metrics.tests.metrics_kit import Ingestor, append, block, open_run, points, run_id, series

values = st.sampled_from([-math.inf, -1.0, -0.0, 0.5, 2.0, math.inf, math.nan])


@pytest.fixture
def ingestor(each_ingestor):
    """What is in the database is part of every answer here: all tests run on both."""
    return each_ingestor


@st.composite
def batches(draw):
    """Batches of one or two blocks, of any rank; every time occurs once."""
    found, time = [], 0
    for _ in range(draw(st.integers(0, 8))):
        size = draw(st.integers(1, 4))
        names = draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=3, unique=True))
        steps = draw(st.lists(st.integers(-3, 3), min_size=size, max_size=size))
        times = np.arange(time, time + size, dtype="<i8")
        time += size
        rows = pb.Block(
            names=names,
            step=np.array(steps, "<i8").tobytes(),
            time_ns=times.tobytes(),
            value=np.array([[draw(values) for _ in range(size)] for _ in names], "<f8").tobytes(),
        )
        found.append(pb.Rows(rank=draw(st.integers(-1, 1)), count=size, blocks=[rows]))
    return found


def model_of(found):
    """The summary by looking at every point."""
    points = {}
    for rows in found:
        for each in rows.blocks:
            step, time = np.frombuffer(each.step, "<i8"), np.frombuffer(each.time_ns, "<i8")
            value = np.frombuffer(each.value, "<f8").reshape(len(each.names), -1)
            for name, column in zip(each.names, value, strict=True):
                found_points = zip(step.tolist(), time.tolist(), column.tolist(), strict=True)
                points.setdefault((name, rows.rank), []).extend(found_points)
    return {key: described(found) for key, found in points.items()}


def described(found):
    numbers = [value for _, _, value in found if not math.isnan(value)]
    step, time, value = max(found, key=lambda point: point[:2])
    low, high = (min(numbers), max(numbers)) if numbers else (math.nan, math.nan)
    return len(found), step, time, *map(str, (value, low + 0.0, high + 0.0))


def as_model(summary):
    return {
        (name, rank): (count, step, time, *map(str, (value, low + 0.0, high + 0.0)))
        for name, (rank, count, step, time, value, low, high) in zip(
            summary.names, summary.entries.tolist(), strict=True
        )
    }


@examples(deadline=None)
@given(found=batches())
def test_blocks_and_points_make_the_same_summary_as_looking_at_every_point(found):
    by_blocks, by_points, merged = Summary(), Summary(), Summary()
    for rows in found:
        by_blocks.add_rows(rows)
        alone = Summary()
        alone.add_rows(rows)
        merged.merge(alone)
    requests = [pb.AppendRequest(writer_id="w", rows=rows) for rows in found]
    by_points.add_columns(join(list(decode(requests))))
    assert as_model(by_blocks) == as_model(by_points) == as_model(merged) == model_of(found)


@examples(deadline=None)
@given(found=batches())
def test_a_packed_summary_is_the_same_summary(found):
    summary = Summary()
    for rows in found:
        summary.add_rows(rows)
    again = Summary.unpack(summary.pack())
    assert as_model(again) == as_model(summary)
    assert dict(again.leads()).keys() == dict(summary.leads()).keys()


def test_bytes_that_are_no_summary_are_refused():
    good = Summary()
    good.add_rows(pb.Rows(count=1, blocks=[block({"a": [1.0]})]))
    for bad in (b"", b"x" * 40, good.pack()[:-1], good.pack() + b"x"):
        with pytest.raises(BadSummary):
            Packed.of(bad)


def test_leads_are_the_changed_last_values_of_the_lowest_rank():
    summary = Summary()
    summary.add_rows(pb.Rows(rank=1, count=1, blocks=[block({"a": [1.0], "b": [2.0]})]))
    before = summary.revision
    assert dict(summary.leads()) == {"a": 1.0, "b": 2.0}
    summary.add_rows(pb.Rows(rank=0, count=1, blocks=[block({"a": [3.0]})]))
    assert dict(summary.leads(before)) == {"a": 3.0}
    summary.add_rows(pb.Rows(rank=1, count=1, blocks=[block({"a": [4.0]}, first_step=9)]))
    assert dict(summary.leads()) == {"a": 3.0, "b": 2.0}


# The same through a real service


async def listed(stub, **of):
    answer = await stub.ListSeries(pb.ListSeriesRequest(selector=pb.SeriesSelector(**of)))
    return {
        (info.name, info.rank): (info.count, info.last_step, info.last_value, info.min_value, info.max_value)
        for info in answer.series
    }


async def recomputed(stub, **of):
    """The same from every point of the stitched series."""
    answer = await stub.QuerySeries(pb.QuerySeriesRequest(selector=pb.SeriesSelector(**of)))
    return {
        (found.name, found.rank): (
            len(found.value),
            max(found.step),
            found.value[max(range(len(found.step)), key=lambda i: (found.step[i], found.time_ns[i]))],
            min(found.value),
            max(found.value),
        )
        for found in answer.series
    }


async def searched(stub, names):
    answer = await stub.SearchRuns(pb.SearchRunsRequest(names=names, page_size=1000))
    return {
        found.run.job_id: {
            name: (count, step, value)
            for name, count, step, value in zip(names, found.count, found.last_step, found.last_value, strict=True)
            if count
        }
        for found in answer.runs
    }


async def crash(ingestor):
    """Everything ends as if the process had: nothing is saved, no mark is taken back."""
    app = ingestor.app
    await app._summaries.cease()
    await app._logs.close()
    await app._store.close()
    await ingestor._server.stop(None)
    await ingestor.start()


writes = st.tuples(st.just("write"), st.integers(0, 2), st.integers(1, 4), st.sampled_from(["loss", "acc"]))
attempts = st.tuples(st.just("attempt"), st.one_of(st.none(), st.just(""), st.integers(0, 8)))
script = st.lists(
    st.one_of(writes, writes, attempts, st.just(("crash",)), st.just(("restart",)), st.just(("list",))), max_size=12
)


class Story:
    """One job whose attempts write, rewind and are restarted, as an agent would have it."""

    def __init__(self, ingestor):
        self.ingestor = ingestor
        self.number = 0
        self.positions = {}

    async def begin(self, cut=None):
        self.number += 1
        rewind = None
        if cut == "":
            rewind = pb.Rewind()
        elif cut is not None and self.number > 1:
            rewind = pb.Rewind(checkpoint="version", cut={f"w{self.number - 1}": cut}, fence=self.number - 1)
        await open_run(self.ingestor.user(), self.number, fence=self.number, rewind=rewind)

    async def write(self, back, size, name):
        """Some rows of an attempt, perhaps of one that was replaced already: its leftovers come late."""
        run = max(1, self.number - back)
        first = self.positions.get(run, 0)
        values = [float((first + index) * (-1) ** run) for index in range(size)]
        await append(self.ingestor.user(), points(values, first=first, run=run, writer=f"w{run}", name=name))
        self.positions[run] = first + size

    async def check(self):
        stub = self.ingestor.user()
        expected = await recomputed(stub, job_id="job")
        assert await listed(stub, job_id="job") == expected
        found = (await searched(stub, ["loss", "acc"]))["job"]
        assert found == {name: of[:3] for (name, _), of in expected.items()}
        for run in range(1, self.number + 1):
            assert await listed(stub, run_id=run_id(run)) == await recomputed(stub, run_id=run_id(run))


async def tell(ingestor, steps):
    story = Story(ingestor)
    await story.begin()
    for name, *arguments in steps:
        match name:
            case "write":
                await story.write(*arguments)
            case "attempt":
                await story.begin(*arguments)
            case "crash":
                await crash(ingestor)
            case "restart":
                await ingestor.restart()
            case "list":
                await story.check()
    await story.check()


@examples(max_examples=25, deadline=None)
@given(steps=script)
def test_a_jobs_summary_is_that_of_its_visible_points_whatever_happened(tmp_path_factory, steps):
    async def run():
        ingestor = Ingestor(tmp_path_factory.mktemp("home"))
        await ingestor.start()
        try:
            await tell(ingestor, steps)
        finally:
            await ingestor.stop()

    asyncio.run(run())


async def test_a_crash_loses_and_doubles_nothing(ingestor):
    await open_run(ingestor.user())
    await append(ingestor.user(), points([1.0, 2.0]))
    assert (await searched(ingestor.user(), ["loss"]))["job"] == {"loss": (2, 1, 2.0)}
    await append(ingestor.user(), points([3.0], first=2))
    await crash(ingestor)
    assert (await searched(ingestor.user(), ["loss"]))["job"] == {"loss": (3, 2, 3.0)}


async def test_after_an_orderly_end_no_run_is_marked(ingestor):
    await open_run(ingestor.user())
    await append(ingestor.user(), points([1.0]))
    await ingestor.restart()
    assert (await listed(ingestor.user(), job_id="job"))["loss", 0][0] == 1
    assert await ingestor.app._store.read(summary_rows.dirty) == []


async def test_damaged_records_of_one_run_do_not_keep_others_from_being_found(ingestor):
    stub = ingestor.user()
    for number in (1, 2):
        await open_run(stub, number, job=f"job-{number}")
        await append(stub, points([float(number)] * 3, run=number), points([9.0], first=3, run=number))
    await crash_with_damage(ingestor)
    assert (await searched(ingestor.user(), ["loss"]))["job-2"] == {"loss": (4, 3, 9.0)}


async def crash_with_damage(ingestor):
    app = ingestor.app
    await app._summaries.cease()
    await app._logs.close()
    await app._store.close()
    await ingestor._server.stop(None)
    records = ingestor.records(1)
    content = bytearray(records.read_bytes())
    content[40] ^= 1
    records.write_bytes(content)
    await ingestor.start()


async def test_a_summary_that_cannot_be_made_says_so(ingestor):
    async def fail(run, begin):
        begin()
        raise DataLoss("broken", reason="RecordsDamaged")

    await open_run(ingestor.user())
    tracked = await ingestor.app._summaries.track(run_id(1))
    ingestor.app._summaries._remake = fail
    ingestor.app._summaries._begin(tracked)
    with pytest.raises(DataLoss):
        await ingestor.app._summaries.track(run_id(1))


async def test_hidden_points_are_listed_when_asked_for(ingestor):
    stub = ingestor.user()
    await open_run(stub, 1, fence=1)
    await append(stub, points(range(10), writer="first"))
    await open_run(stub, 2, fence=2, rewind=pb.Rewind(checkpoint="version", cut={"first": 6}))
    assert (await listed(stub, job_id="job"))["loss", 0][0] == 6
    assert (await listed(stub, job_id="job", include_hidden=True))["loss", 0][0] == 10
    assert list((await series(stub, include_hidden=True))["loss", 0].step) == list(range(10))


async def until(condition):
    """Returns once something holds; a test's own deadline ends the wait otherwise."""
    while not await condition():
        await asyncio.sleep(0.01)


async def test_a_run_that_is_quiet_is_unmarked_then_dropped_and_still_known(ingestor):
    await ingestor.restart(summary_interval_s=0.01, summary_quiet_s=0.05, summary_kept_s=0.1)
    await open_run(ingestor.user())
    await append(ingestor.user(), points([1.0, 2.0]))

    async def dropped():
        return not ingestor.app._summaries._tracked

    await until(dropped)
    assert await ingestor.app._store.read(summary_rows.dirty) == []
    assert await listed(ingestor.user(), job_id="job") == {("loss", 0): (2, 1, 2.0, 1.0, 2.0)}
    await append(ingestor.user(), points([0.5], first=2))
    assert await listed(ingestor.user(), job_id="job") == {("loss", 0): (3, 2, 0.5, 0.5, 2.0)}


async def test_a_run_is_marked_for_as_long_as_somebody_may_write_to_it(ingestor):
    await ingestor.restart(summary_interval_s=0.01, summary_quiet_s=0.01)
    await open_run(ingestor.user())
    call = ingestor.user().Append()
    for first in range(5):
        await call.write(points([1.0], first=first))
        await call.read()
        await searched(ingestor.user(), ["loss"])  # everything is saved by now
        await ingestor.app._summaries._tidy()
        assert await ingestor.app._store.read(summary_rows.dirty) == [run_id(1)]
    await call.done_writing()


@pytest.mark.parametrize("turns", range(6))
async def test_keeping_ends_also_when_a_change_comes_at_that_moment(ingestor, turns):
    summaries = ingestor.app._summaries
    summaries._changed.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    async with asyncio.timeout(PATIENCE_S):
        await summaries.cease()
