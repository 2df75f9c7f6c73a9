"""A run played by hand: appended to as the ingestor does it, compacted and reopened at will."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from trainyard_metrics.storage import compaction
from trainyard_metrics.storage.folder import RunFolder
from trainyard_protos.v1 import metrics_pb2 as pb

from services.metrics.tests.metrics_kit import block, lines, run_id

shapes = st.lists(st.sampled_from(["a", "b", "c", "ä"]), unique=True, max_size=4)


def rows(writer, rank, first, picks, number):
    """Rows that log the given names in turn; every value is its own."""
    by_shape = {}
    for row, names in enumerate(picks):
        by_shape.setdefault(tuple(names), []).append(row)
    blocks = []
    for names, chosen in by_shape.items():
        count = len(chosen)
        made = block({name: number(count) for name in names} or {"": [0] * count}, row=chosen)
        if not names:
            made.names.pop()
            made.value = b""
        blocks.append(made)
    return pb.AppendRequest(
        run_id=run_id(1), writer_id=writer, first_seq=first, rows=pb.Rows(rank=rank, count=len(picks), blocks=blocks)
    )


writers = st.sampled_from([("w0", 0), ("w1", 1), ("agent", -1)])
row_batches = st.tuples(writers, st.lists(shapes, min_size=1, max_size=6))
line_batches = st.tuples(
    st.sampled_from(["node-0", "node-1"]),
    st.lists(st.tuples(st.integers(0, 20), st.integers(-1, 2), st.text(max_size=5)), min_size=1, max_size=5),
)
actions = st.lists(
    st.one_of(row_batches, line_batches, st.sampled_from(["roll", "compact", "reopen"])), min_size=1, max_size=30
)


class Player:
    """Appends to a run as the ingestor does, and to a second one that is never compacted."""

    def __init__(self, root):
        self.folders = [RunFolder(root / name / run_id(1)) for name in ("compacted", "plain")]
        self.states = [folder.open() for folder in self.folders]
        self.next = {}
        self.value = 0

    def play(self, action):
        if isinstance(action, str):
            getattr(self, action)()
            return
        (writer, rank), picks = action if isinstance(action[0], tuple) else ((action[0], 0), None)
        first = self.next.get(writer, 0)
        request = (
            self.lines(writer, first, action[1]) if picks is None else rows(writer, rank, first, picks, self.count)
        )
        self.next[writer] = first + len(action[1])
        for folder, state in zip(self.folders, self.states, strict=True):
            offset, size = folder.append([request])
            state.segments[-1].size = size
            state.add(state.segments[-1], offset, [request])

    def count(self, size):
        self.value += size
        return np.arange(self.value - size, self.value, dtype=float)

    def lines(self, writer, first, made):
        request = lines([], first=first, writer=writer)
        time = self.states[0].line_times.get(writer, 0)
        for index, (later, rank, text) in enumerate(made):
            time += later
            request.lines.lines.add(seq=first + index, time_ns=time, rank=rank, text=text, stream="output", node=1)
        return request

    def roll(self):
        state = self.states[0]
        if not state.segments[-1].frames:
            return
        state.segments.append(self.folders[0].roll(state.segments[-1].number + 1))

    def compact(self):
        folder, state = self.folders[0], self.states[0]
        self.roll()
        while len(state.segments) > 1:
            made = compaction.compact(folder.path, state.segments[0].number)
            self.switch(state.compacted(state.segments[0], made), made)
        for kind in ("points", "lines"):
            files = state.manifest.of_kind(kind)
            if len(files) > 2:
                made = compaction.merge(folder.path, files)
                self.switch(state.manifest.exchange({file.name for file in files}, tuple(made.files)), made)

    def switch(self, new, made):
        self.folders[0].switch(new, made)
        self.states[0].switched(new)

    def reopen(self):
        self.folders[0].close()
        self.states[0] = self.folders[0].open()

    def close(self):
        for folder in self.folders:
            folder.close()


def everything(points):
    """Points as a set of facts: their order over series is not given."""
    return sorted(
        (
            points.names[name],
            int(rank),
            points.writers[writer],
            int(row),
            int(step),
            int(time_ns),
            np.float64(value).tobytes(),
        )
        for name, rank, writer, row, step, time_ns, value in zip(
            points.name, points.rank, points.writer, points.row, points.step, points.time_ns, points.value, strict=True
        )
    )


def filled(root, segments=3):
    player = Player(root)
    for _ in range(segments):
        player.play((("w0", 0), [["a", "b"]] * 50))
        player.play((("w1", 1), [["a"], ["c"]] * 10))
        player.play(("node-0", [(1, 0, "hello"), (2, 1, "world")]))
        player.roll()
    return player
