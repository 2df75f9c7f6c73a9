"""What of a job's attempts makes its series: points before the cuts, read from snapshots. Blocking; for threads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trainyard_metrics.domain.columns import Columns, Mask
from trainyard_metrics.domain.stitch import Attempt, Cut, Elsewhere, Segment, timeline
from trainyard_metrics.domain.summary import Summary
from trainyard_metrics.storage.snapshot import Snapshot

AGENT_RANK = -1
_AGENT = frozenset({AGENT_RANK})
_MAX_ROW = 2**63 - 1

Names = Callable[[str], bool] | Collection[str]


@dataclass(frozen=True, slots=True)
class Source:
    """The points of one run that count.

    Attributes:
        segment: what no rewind hid; None: nothing but what the agent measured, which belongs to the clock, not to
            steps, and is never hidden.
    """

    fence: int
    snapshot: Snapshot
    segment: Segment | None

    def read(self, names: Names | None = None) -> Iterator[Columns]:
        """Its visible points of some names, in parts of bounded size.

        Raises:
            Damaged: stored bytes are not what was written.
        """
        cut = self.segment.cut if self.segment else None
        for part in self.snapshot.chunks(names, None if self.segment else _AGENT):
            yield part if cut is None else part.take(_before(part, cut))


def stitched(attempts: Sequence[Attempt], snapshots: Mapping[str, Snapshot]) -> list[Source]:
    """The sources of a job's series, oldest attempt first."""
    segments = {segment.run_id: segment for segment in timeline(attempts, lambda run: snapshots[run].writers)}
    return [
        Source(attempt.fence, snapshots[attempt.run_id], segments.get(attempt.run_id))
        for attempt in sorted(attempts, key=lambda attempt: attempt.fence)
    ]


def whole(attempts: Sequence[Attempt], snapshots: Mapping[str, Snapshot]) -> list[Source]:
    """Everything that these attempts stored, also what a rewind hid."""
    return [
        Source(attempt.fence, snapshots[attempt.run_id], Segment(attempt.run_id, attempt.fence))
        for attempt in sorted(attempts, key=lambda attempt: attempt.fence)
    ]


def summarise(sources: Iterable[Source], names: Names | None = None) -> Summary:
    """The summary of all points."""
    summary = Summary()
    for source in sources:
        for part in source.read(names):
            summary.add_columns(part)
    return summary


def _before(columns: Columns, cut: Cut) -> Mask:
    of_agent: Mask = columns.rank == AGENT_RANK
    if not len(columns):
        return of_agent
    limits = np.array([min(cut.positions.get(writer, 0), _MAX_ROW) for writer in columns.writers], np.int64)
    before: Mask = of_agent | (columns.row < limits[columns.writer])
    return before if cut.elsewhere is None else before | _before_elsewhere(columns, cut.positions, cut.elsewhere)


def _before_elsewhere(columns: Columns, positions: Mapping[str, int], end: Elsewhere) -> Mask:
    # A '/' is in the id of whatever an agent writes, whose steps are not those of training.
    unknown = np.array([writer not in positions and "/" not in writer for writer in columns.writers], np.bool_)
    found: Mask = unknown[columns.writer] & ~np.isin(columns.rank, end.ranks)
    return found & (columns.step <= end.step) & (columns.time_ns <= end.until_ns)
