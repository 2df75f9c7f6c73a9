"""How far a transfer is, on a terminal; nothing in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trainyard.cli.terminal import is_terminal


@contextmanager
def progress(label: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """A bar on standard error while the block runs; yields what is told of bytes that are done."""
    if not is_terminal(sys.stderr):
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    from trainyard.cli.bars import PlainColumn

    columns = (
        PlainColumn(),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task(label, total=total_bytes)
        yield lambda done: bars.advance(bar, done)
