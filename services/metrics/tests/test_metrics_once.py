"""Exactly once, under any order of sending: a model that knows nothing of the ingestor checks what is stored."""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from servicekit.errors import OutOfRange
from trainyard_metrics.counters import Counters
from trainyard_metrics.runlogs import RunLogs
from trainyard_metrics.settings import Settings

from services.metrics.tests.metrics_kit import lines, points, run_id

sends = st.tuples(st.sampled_from(["points-a", "points-b", "lines-c"]), st.integers(0, 30), st.integers(0, 12))
actions = st.lists(st.one_of(sends, st.just("wait"), st.just("restart")), max_size=40)


class Model:
    """What has to be stored: each writer's records from 0 to a position that grows by batches without a hole."""

    def __init__(self):
        self.positions = {}

    def accepts(self, writer, first, count):
        position = self.positions.get(writer, 0)
        if first > position:
            return False
        self.positions[writer] = max(position, first + count)
        return True


def batch(writer, first, count):
    if writer.startswith("lines"):
        return lines([f"{writer} {first + index}" for index in range(count)], first=first, writer=writer)
    return points([float(first + index) for index in range(count)], first=first, writer=writer, name=writer)


async def stored(root):
    """Everything a fresh ingestor reads from the files."""
    logs = make(root)
    found = {}
    async with logs.use(run_id(1)) as log:
        snapshot = log.snapshot()
        points = snapshot.points()
        for name, row, value in zip(points.name, points.row, points.value, strict=True):
            found.setdefault(points.names[name], []).append((int(row), float(value)))
        for line in snapshot.lines():
            writer, number = line.text.split()
            found.setdefault(writer, []).append((int(line.seq), float(number)))
    await logs.close()
    return {writer: sorted(records) for writer, records in found.items()}


def make(root):
    return RunLogs(root, Settings(), Counters(CollectorRegistry()), lambda run, requests: None)


async def play(root, script):
    model, logs, waiting = Model(), make(root), []
    for action in script:
        if action == "wait":
            await asyncio.gather(*waiting)
            waiting.clear()
        elif action == "restart":
            await logs.close()
            logs = make(root)
        else:
            async with logs.use(run_id(1)) as log:
                try:
                    waiting.append(log.stage(batch(*action)))
                    taken = True
                except OutOfRange as error:
                    assert int(error.fields["expected"]) == model.positions.get(action[0], 0)
                    taken = False
            assert taken == model.accepts(*action)
    await asyncio.gather(*waiting)
    async with logs.use(run_id(1)) as log:
        assert all(log.position(writer) == position for writer, position in model.positions.items())
    await logs.close()
    return model


@settings(max_examples=100, deadline=None)
@given(script=actions)
def test_replayed_reordered_and_overlapping_batches_are_stored_once(tmp_path_factory, script):
    root = tmp_path_factory.mktemp("runs")

    async def run():
        model = await play(root, script)
        expected = {
            writer: [(number, float(number)) for number in range(position)]
            for writer, position in model.positions.items()
            if position
        }
        assert await stored(root) == expected

    asyncio.run(run())
