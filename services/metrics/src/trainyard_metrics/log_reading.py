"""One reader's way through stored lines.

A reader holds files and decoded lines only while it has a slot (see `servicekit.slots`). One that does not take its
next page loses both when others need the slot, or after a while. It continues at its position, with new snapshots, and
gets the lines that it would have got.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence

from servicekit.slots import Slots
from trainyard_protos.v1 import metrics_pb2 as pb

from trainyard_metrics import lines
from trainyard_metrics.domain.lines import LineFilter
from trainyard_metrics.reading import Reader, removed
from trainyard_metrics.tables import RunRow


class LogReading:
    """Reads lines of some runs in pages.

    Args:
        slots: of those who read lines.
        rows: the runs, oldest attempt first.
        tail: only the last lines; 0: all.
        after: only lines behind this position; None: from the first.
    """

    def __init__(
        self,
        reader: Reader,
        slots: Slots,
        rows: Sequence[RunRow],
        wanted: LineFilter,
        tail: int,
        after: lines.Position | None,
    ) -> None:
        self._reader = reader
        self._slots = slots
        self._run_ids = {row.fence: row.id for row in rows}
        self._wanted = wanted
        self._tail = tail
        self._after = after
        # Time of each attempt's newest line when the reader came: one that writers outpace would never come to an end.
        self._ends: dict[int, int] = {}
        self._pages: Iterator[pb.ReadLogsResponse] | None = None

    async def pages(self) -> AsyncIterator[pb.ReadLogsResponse]:
        """The lines that were stored when the reader came.

        Raises:
            DataLoss: stored bytes are not what was written.
            NotFound: a run was removed meanwhile.
        """
        with self._slots.slot() as slot:
            while True:
                await slot.acquire()
                pages = self._pages or await self._open()
                page = await self._reader.run(lambda pages=pages: next(pages, None))  # type: ignore[misc]
                if page is None:
                    return
                self._pages, self._after = pages, lines.position_of(page.position)
                del pages  # what is idle can be released
                slot.idle(self._release)
                yield page

    def _release(self) -> None:
        self._pages = None

    async def _open(self) -> Iterator[pb.ReadLogsResponse]:
        sources = []
        for attempt, run_id in self._run_ids.items():
            if self._after is None or attempt >= self._after.attempt:
                snapshot = await self._reader.snapshot(run_id)
                if self._ends.get(attempt) and not snapshot.positions:
                    raise removed()
                sources.append((attempt, snapshot))
        if not self._ends:
            self._ends = {attempt: snapshot.last_line_ns for attempt, snapshot in sources}
        return lines.read(sources, self._wanted, self._tail, self._after, self._ends)
