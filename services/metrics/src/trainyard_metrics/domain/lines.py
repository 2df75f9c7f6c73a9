"""Lines of output: which are wanted, and their order."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from trainyard_protos.v1.common_pb2 import LogLine

Key = tuple[int, str, int]
"""By which stored lines are ordered: (time, writer, number)."""
Line = tuple[Key, LogLine]
Step = tuple[Key, LogLine | None]
"""A line; or, without one, a key that nothing that is left of a source comes before: it is read when it is asked on."""


@dataclass(frozen=True, slots=True)
class LineFilter:
    """Which lines are wanted.

    Attributes:
        ranks: of these; empty: of all.
        from_time_ns: not before.
        search: contained in the text; "" for all.
        regex: found in the text, RE2 syntax; "" for all. Callers check it before.
    """

    ranks: frozenset[int] = frozenset()
    from_time_ns: int = 0
    search: str = ""
    regex: str = ""


def order(writer_id: str, line: LogLine) -> Key:
    """The key by which stored lines are ordered. Lines of a writer never go back in time: see `RunLog.stage`."""
    return line.time_ns, writer_id, line.seq


def in_order(sources: Iterable[Iterator[Step]], *, backwards: bool = False) -> Iterator[Line]:
    """The lines of all sources in order. What follows a step without a line is asked for when it is its turn."""
    for key, line in heapq.merge(*sources, key=lambda step: step[0], reverse=backwards):
        if line is not None:
            yield key, line


def matcher(wanted: LineFilter) -> Callable[[LogLine], bool]:
    """Whether a line is wanted."""
    found = _finder(wanted.regex)
    return lambda line: (
        line.time_ns >= wanted.from_time_ns
        and (not wanted.ranks or line.rank in wanted.ranks)
        and wanted.search in line.text
        and found(line.text)
    )


def _finder(regex: str) -> Callable[[str], bool]:
    if not regex:
        return lambda text: True
    import re2  # here, because few readers give one and it costs a shared library

    compiled = re2.compile(regex)
    return lambda text: compiled.search(text) is not None
