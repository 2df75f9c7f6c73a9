"""Live lines on rich's console.

Names and messages come from users and jobs. rich reads `[/x]` in a string as markup, and passes escape sequences on:
this module is the one place that hands such text to a bar.
"""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.progress import ProgressColumn, Task
from rich.table import Column
from rich.text import Text

from trainyard.cli import live_line
from trainyard.cli.live_line import LiveLine


class LineColumn(ProgressColumn):
    """Shows a task as one live line as wide as the terminal.

    Args:
        line: what to show of a task.
    """

    def __init__(self, line: Callable[[Task], LiveLine]) -> None:
        super().__init__(table_column=Column(no_wrap=True, ratio=1))
        self._line = line

    def render(self, task: Task) -> _Line:
        return _Line(self._line(task))


class _Line:
    def __init__(self, line: LiveLine) -> None:
        self._line = line

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        name, *others = live_line.fit(self._line, options.max_width)
        text = Text(live_line.SEPARATOR.join([name, *others]), no_wrap=True)
        text.stylize("bold", 0, len(name))
        yield text
