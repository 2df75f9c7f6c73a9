"""The command metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from trainyard.cli.arguments import LAST, OptionalOf, Output, with_client
from trainyard.cli.output import Format

if TYPE_CHECKING:
    from trainyard_protos.v1 import metrics_pb2

    from trainyard.client import AsyncClient

_PLOT_POINTS = 400


def register(app: typer.Typer) -> None:
    app.command()(metrics)


def metrics(
    of: OptionalOf = LAST,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Series to plot; globs are fine.")
    ] = None,
    points: Annotated[
        int, typer.Option(min=0, help="Points a series at most, least and greatest kept; 0 for all.")
    ] = 0,
    hidden: Annotated[
        bool, typer.Option("--hidden", help="Also what was written beyond the checkpoint that an attempt resumed from.")
    ] = False,
    output: Output = Format.TABLE,
) -> None:
    """Show what a job or script tracked: a table of all series, or plots of those named. With -o json, their points."""

    async def work(client: AsyncClient) -> None:
        from trainyard.cli.output import write

        subject = await client.subject(of)
        if output.for_programs:
            write(await client.metrics(subject, names or (), max_points=points, include_hidden=hidden), output)
        elif names:
            most = points or _PLOT_POINTS
            _plot(await client.metrics(subject, names, max_points=most, include_hidden=hidden))
        else:
            series = await client.series(subject, include_hidden=hidden)
            _table(subject.job_id or subject.run_id, series, wide=output is Format.WIDE)

    with_client(work, reads=True)


def _table(job: str, series: Sequence[metrics_pb2.SeriesInfo], *, wide: bool) -> None:
    from trainyard.cli import tables, words
    from trainyard.cli.terminal import next_steps, say
    from trainyard.client.names import SYSTEM_PREFIX

    shown = [each for each in series if wide or not each.name.startswith(SYSTEM_PREFIX)]
    if not shown:
        say("nothing was tracked yet; a script does it with: from trainyard import tracker; tracker.log({'loss': 0.1})")
        next_steps(f"yard metrics {words.short(job)} -o wide", f"yard logs {words.short(job)}")
        return
    rows = [
        [
            each.name,
            str(each.rank),
            str(each.count),
            str(each.last_step),
            words.number(each.last_value),
            words.number(each.min_value),
            words.number(each.max_value),
        ]
        for each in shown
    ]
    tables.show(["SERIES", "RANK", "POINTS", "STEP", "LAST", "LEAST", "GREATEST"], rows)
    next_steps(f"yard metrics {words.short(job)} '{shown[0].name}'", f"yard metrics {words.short(job)} -o json")


def _plot(series: Sequence[metrics_pb2.Series]) -> None:
    from trainyard.cli.plots import show
    from trainyard.errors import NotFound

    if not series:
        raise NotFound("no series of that name", reason="NoSeries", hint="'yard metrics JOB' lists them")
    for each in series:
        show(each)
