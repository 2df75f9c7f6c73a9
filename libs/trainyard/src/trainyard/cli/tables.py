"""Columns of text."""

from __future__ import annotations

import re
import shutil
from collections.abc import Container, Sequence

from trainyard.cli import terminal

_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def show(headers: Sequence[str], rows: Sequence[Sequence[str]], *, uncut: Container[int] = ()) -> None:
    """Writes aligned columns; on a terminal, the last column is cut to the width.

    Args:
        uncut: indexes of rows whose last column is written in full all the same.
    """
    headers, rows = _cleaned(headers), [_cleaned(row) for row in rows]
    widths = [max(_width(row[column]) for row in [headers, *rows]) for column in range(len(headers))]
    terminal.say(terminal.styled(_line(headers, widths), "bold"))
    for index, row in enumerate(rows):
        terminal.say(_line(row, widths, cut=index not in uncut))


def _cleaned(cells: Sequence[str]) -> list[str]:
    """What is not shown takes no width, and a line end in a name starts no row."""
    return [terminal.clean(" ".join(cell.splitlines())) for cell in cells]


def _line(cells: Sequence[str], widths: Sequence[int], *, cut: bool = True) -> str:
    *padded, last = [cell + " " * (width - _width(cell)) for cell, width in zip(cells, widths, strict=True)]
    start = "  ".join([*padded, ""])
    return (start + (_cut(last, _width(start)) if cut else last)).rstrip()


def _cut(text: str, used: int) -> str:
    if not terminal.is_terminal():
        return text
    room = shutil.get_terminal_size().columns - used
    plain = _ESCAPE.sub("", text).rstrip()
    return text if len(plain) <= room else plain[: max(room - 1, 0)] + "…"


def _width(text: str) -> int:
    return len(_ESCAPE.sub("", text))


def pairs(items: Sequence[tuple[str, str]]) -> None:
    """Writes names and values; items without a value are left out."""
    shown = [(terminal.clean(name), value) for name, value in items if value]
    width = max((_width(name) for name, _ in shown), default=0)
    for name, value in shown:
        first, *more = value.splitlines()
        terminal.say(f"{terminal.styled(name + ' ' * (width - _width(name)), 'dim')}  {first}")
        for line in more:
            terminal.say(f"{' ' * width}  {line}")
