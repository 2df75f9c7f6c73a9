"""The text of a live line: name, state, percent and time left come first, and fit into any terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len

from trainyard.cli import terminal, words

SEPARATOR = " "
_BAR_CELLS = 20
_LEAST_NAME = (16, 8, 3)
"""Cells that the name keeps before, one after the other, the time left gets shorter, shorter still, and the state."""
_LEAST_STATE = 4
_LEAST_CUT = 8
"""A part that is not shown in full needs this much room."""


@dataclass(frozen=True, slots=True)
class LiveLine:
    """What a live line shows, the most important part first."""

    name: str
    state: str = ""
    done: float | None = None
    """Share that is done, 0 to 1; None while unknown."""
    seconds_left: float | None = None
    others: Sequence[str] = ()
    """What is shown where there is room, the most important first."""


def fit(line: LiveLine, width: int) -> list[str]:
    """Returns the parts to show, which joined by `SEPARATOR` take at most `width` terminal cells.

    Name, state, percent and time left are the first four; one that is not known is left out. Other parts are cut or
    dropped before these. Then the name gets shorter, then the form of the time left, then the state.
    """
    name, state = terminal.plain(line.name), terminal.plain(line.state)
    percent = "" if line.done is None else f"{int(_share(line.done) * 100)}%"
    first = [part for part in _first(name, state, percent, line.seconds_left, width) if part]
    if line.done is not None and _cells([*first, bar(line.done)]) <= width:
        first.append(bar(line.done))  # a part of a bar would say another share
    others = filter(None, map(terminal.plain, line.others))
    return [*first, *_that_fit(others, width - _cells(first))]


def bar(done: float) -> str:
    """A bar for the share that is done, 0 to 1."""
    full = int(_share(done) * _BAR_CELLS)
    return "━" * full + "╌" * (_BAR_CELLS - full)


def shorten(text: str, cells: int) -> str:
    """Cuts text to a number of terminal cells, in the middle: names of one kind often differ only at their ends."""
    if cell_len(text) <= cells:
        return text
    if cells < 1:
        return ""
    tail = _end(text, (cells - 1) // 3)
    return _beginning(text, cells - 1 - cell_len(tail)) + "…" + tail


def _first(name: str, state: str, percent: str, seconds_left: float | None, width: int) -> list[str]:
    for least, left in zip(_LEAST_NAME, _forms(seconds_left), strict=True):
        others = [part for part in (state, percent, left) if part]
        room = width - _cells(others) - bool(others)
        if room >= min(cell_len(name), least):
            return [shorten(name, room), state, percent, left]
    rest = [part for part in (percent, left) if part]
    room = width - _cells(rest) - bool(rest) - len(SEPARATOR) - _LEAST_NAME[-1]
    room = max(room, _LEAST_STATE)
    state = state if cell_len(state) <= room else _beginning(state, room - 1) + "…"
    name = shorten(name, min(_LEAST_NAME[-1], width))
    while (parts := [part for part in (name, state, *rest) if part]) and _cells(parts) > width:
        # Narrower than anything can be shown in.
        state, rest = "", rest[:-1] if not state else rest
    return parts


def _forms(seconds: float | None) -> tuple[str, str, str]:
    """The time left in full, without spaces, and in its largest unit alone."""
    if seconds is None:
        return "", "", ""
    text = words.duration(seconds)
    number, unit, *_ = text.split()
    compact = text.replace("min", "m").replace(" ", "")
    return f"{text} left", compact, f"{number}{'m' if unit == 'min' else unit}"


def _that_fit(parts: Iterable[str], room: int) -> list[str]:
    """Those that fit in full; of the first that does not, its beginning."""
    shown: list[str] = []
    for part in parts:
        room -= len(SEPARATOR)
        if cell_len(part) > room:
            return [*shown, _beginning(part, room - 1) + "…"] if room >= _LEAST_CUT else shown
        shown.append(part)
        room -= cell_len(part)
    return shown


def _share(done: float) -> float:
    return min(max(done, 0.0), 1.0)


def _cells(parts: Sequence[str]) -> int:
    return cell_len(SEPARATOR.join(parts))


def _beginning(text: str, cells: int) -> str:
    end = len(text)
    while cell_len(text[:end]) > cells:
        end -= 1
    return text[:end]


def _end(text: str, cells: int) -> str:
    start = 0
    while cell_len(text[start:]) > cells:
        start += 1
    return text[start:]
