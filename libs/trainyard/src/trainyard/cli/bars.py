"""Columns of rich's progress bars.

Names and messages come from users and jobs. rich reads `[/x]` in a string as markup, and passes escape sequences on:
this module is the one place that hands such text to a bar.
"""

from __future__ import annotations

from rich.progress import ProgressColumn, Task
from rich.table import Column
from rich.text import Text

from trainyard.cli import terminal


class PlainColumn(ProgressColumn):
    """Shows a task's description, or one of its fields, exactly as it is written.

    Args:
        field: name of the field; "" for the description.
    """

    def __init__(self, field: str = "") -> None:
        super().__init__(table_column=Column(no_wrap=True))
        self._field = field

    def render(self, task: Task) -> Text:
        value = task.fields[self._field] if self._field else task.description
        return Text(terminal.plain(str(value)))
