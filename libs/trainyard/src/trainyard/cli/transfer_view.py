"""How far a transfer is, on a terminal; nothing in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trainyard.cli.terminal import is_terminal


@contextmanager
def progress(label: str, doing: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Shows a live line on standard error while the block runs; yields what is called with each number of bytes done.

    Args:
        label: what is transferred.
        doing: for instance "storing".
        total_bytes: of the transfer.
    """
    if not is_terminal(sys.stderr):
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import Progress, Task

    from trainyard.cli import words
    from trainyard.cli.bars import LineColumn
    from trainyard.cli.live_line import LiveLine

    def line(task: Task) -> LiveLine:
        sizes = f"{words.size(task.completed)} of {words.size(total_bytes)}"
        return LiveLine(
            label,
            doing,
            done=task.completed / total_bytes if total_bytes else None,
            seconds_left=task.time_remaining,
            others=[sizes, *([f"{words.size(task.speed)}/s"] if task.speed else [])],
        )

    with Progress(LineColumn(line), console=Console(stderr=True), expand=True, transient=True) as bars:
        bar = bars.add_task("", total=total_bytes)
        yield lambda done: bars.advance(bar, done)
