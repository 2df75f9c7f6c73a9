"""Series and lines that become data frames; pandas is imported when one is asked for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from trainyard_protos.v1 import metrics_pb2

from trainyard import errors

if TYPE_CHECKING:
    from pandas import DataFrame

_POINT = ("name", "rank", "attempt", "step", "time_ns", "value")
_LINE = ("attempt", "node", "rank", "stream", "seq", "time_ns", "text")


class SeriesList(list[metrics_pb2.Series]):
    """Series with their points as columns."""

    def df(self) -> DataFrame:
        """The points of all series as one data frame, a row each: name, rank, attempt, step, time_ns, value.

        Raises:
            InvalidArgument: PackageMissing: pandas is not installed.
        """
        return _frame(
            (
                (each.name, each.rank, attempt, step, time_ns, value)
                for each in self
                for attempt, step, time_ns, value in zip(
                    _padded(each.attempt, len(each.step)),
                    each.step,
                    _padded(each.time_ns, len(each.step)),
                    each.value,
                    strict=True,
                )
            ),
            _POINT,
        )


class SeriesByName(dict[str, metrics_pb2.Series]):
    """Series by their names."""

    def df(self) -> DataFrame:
        """The points of all series as one data frame; see `SeriesList.df`."""
        return SeriesList(self.values()).df()


class AsyncLines(AsyncIterator[metrics_pb2.StoredLine]):
    """Lines as they are read, once."""

    def __init__(self, lines: AsyncIterator[metrics_pb2.StoredLine]) -> None:
        self._lines = lines

    async def __anext__(self) -> metrics_pb2.StoredLine:
        return await anext(self._lines)

    async def aclose(self) -> None:
        """Ends the read."""
        if hasattr(self._lines, "aclose"):
            await self._lines.aclose()

    async def df(self) -> DataFrame:
        """The lines that are left, as `Lines.df`."""
        return _lines_frame([line async for line in self])


class Lines(Iterator[metrics_pb2.StoredLine]):
    """Lines as they are read, once."""

    def __init__(self, lines: Iterator[metrics_pb2.StoredLine]) -> None:
        self._lines = lines

    def __next__(self) -> metrics_pb2.StoredLine:
        return next(self._lines)

    def df(self) -> DataFrame:
        """The lines that are left as a data frame: attempt, node, rank, stream, seq, time_ns, text.

        Raises:
            InvalidArgument: PackageMissing: pandas is not installed.
        """
        return _lines_frame(self)


def _lines_frame(lines: Iterable[metrics_pb2.StoredLine]) -> DataFrame:
    return _frame(
        (
            (each.attempt, line.node, line.rank, line.stream, line.seq, line.time_ns, line.text)
            for each in lines
            for line in (each.line,)
        ),
        _LINE,
    )


def _padded(values: Iterable[int], length: int) -> list[int]:
    """A column; zeros where an older yard sent none."""
    return list(values) or [0] * length


def _frame(rows: Iterable[tuple[Any, ...]], columns: tuple[str, ...]) -> DataFrame:
    try:
        from pandas import DataFrame
    except ModuleNotFoundError as error:
        raise errors.InvalidArgument(
            "a data frame needs pandas, which is not installed",
            reason="PackageMissing",
            hint="pip install 'trainyard[pandas]'",
        ) from error
    return DataFrame(list(rows), columns=list(columns))
