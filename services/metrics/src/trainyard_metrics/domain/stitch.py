"""Which records of a job's attempts make its series.

The newest attempt counts whole. When it resumed from a checkpoint, the attempt that made the checkpoint counts up to
the checkpoint's cut; when that one had itself resumed, the attempt before counts up to its cut; and so on. What is not
on this line is hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Where trackers end whose logs the node that stored a checkpoint did not see: those of other nodes.

    Attributes:
        step: the last one in the checkpoint.
        until_ns: what was logged later is not in it either.
        ranks: of the storing node, whose writers have positions or began later.
    """

    step: int
    until_ns: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """Which records are in a checkpoint.

    Attributes:
        positions: of each writer, the number of the first record that is not.
        elsewhere: which of writers that have no position; None: nothing of theirs.
    """

    positions: Mapping[str, int] = field(default_factory=dict)
    elsewhere: Elsewhere | None = None


@dataclass(frozen=True, slots=True)
class Resume:
    """How a run began: from a checkpoint, or (checkpoint "") from nothing."""

    checkpoint: str
    cut: Cut
    fence: int = 0  # of the run that made the checkpoint; 0: to be found by the cut's writers


@dataclass(frozen=True, slots=True)
class Attempt:
    """A run as far as stitching is concerned."""

    run_id: str
    fence: int
    resume: Resume | None = None  # None: it goes on where the attempt before ended


@dataclass(frozen=True, slots=True)
class Segment:
    """A run's share of the series: all of it, or what each writer wrote before the cut."""

    run_id: str
    fence: int
    cut: Cut | None = None


def timeline(attempts: Sequence[Attempt], writers: Callable[[str], Collection[str]]) -> list[Segment]:
    """The segments of a job's series, oldest first.

    Args:
        writers: the writers of a run, by its id.
    """
    older = sorted(attempts, key=lambda attempt: attempt.fence)
    segments: list[Segment] = []
    cut: Cut | None = None
    while older:
        current = older.pop()
        segments.append(Segment(current.run_id, current.fence, cut))
        if current.resume is None:
            cut = None
            continue
        older = _up_to_producer(current.resume, older, writers)
        cut = current.resume.cut
    return segments[::-1]


def _up_to_producer(
    resume: Resume, older: Sequence[Attempt], writers: Callable[[str], Collection[str]]
) -> list[Attempt]:
    if not resume.checkpoint:
        return []
    for index in range(len(older) - 1, -1, -1):
        attempt = older[index]
        if attempt.fence == resume.fence or (
            not resume.fence and not resume.cut.positions.keys().isdisjoint(writers(attempt.run_id))
        ):
            return list(older[: index + 1])
    return []
