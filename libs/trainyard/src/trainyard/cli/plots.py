"""Series as plots made of characters."""

from __future__ import annotations

import math
import re
import shutil
from typing import TYPE_CHECKING

import plotext

from trainyard.cli import terminal

if TYPE_CHECKING:
    from trainyard_protos.v1.metrics_pb2 import Series

_WIDTH, _HEIGHT = 100, 16
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def show(series: Series) -> None:
    """Writes one series over its steps; values that are not finite are counted, not drawn."""
    points = [point for point in zip(series.step, series.value, strict=True) if math.isfinite(point[1])]
    missing = len(series.value) - len(points)
    title = f"{series.name} (rank {series.rank}, {series.total} points{f', {missing} not finite' if missing else ''})"
    if not points:
        terminal.say(title)
        return
    figure = plotext.figure
    figure.clear()
    figure.plot_size(min(shutil.get_terminal_size().columns, _WIDTH), _HEIGHT)
    figure.theme("simple")
    figure.title(title)
    figure.label("step", axis="x")
    curve = figure.signal([step for step, _ in points], [value for _, value in points])
    curve.lines()
    figure.draw(curve)
    text = str(figure.build()).rstrip()
    terminal.say(text if terminal.has_colour() else _ESCAPE.sub("", text))
