"""What the dashboards are made of, in few words: a page of rows, a row of charts, a chart of queries.

Grafana's own builders turn it into the JSON that Grafana reads. Panels are laid out from left to right.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.builders import bargauge, common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    BigValueColorMode,
    BigValueGraphMode,
    LegendDisplayMode,
    LegendPlacement,
    StackingMode,
    TooltipDisplayMode,
    VisibilityMode,
    VizOrientation,
)
from grafana_foundation_sdk.models.dashboard import (
    DataSourceRef,
    Threshold,
    ThresholdsMode,
    VariableRefresh,
    VariableSort,
)

_SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
_REFRESH = "30s"
_HEIGHT = {"lines": 8, "number": 4, "bars": 8}


@dataclass(frozen=True, slots=True)
class Query:
    """One query and how its series are called; `{{label}}` is a label's value."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart.

    Args:
        title: what it shows.
        queries: what it asks.
        unit: Grafana's name of the unit.
        kind: `lines` over time, a `number` of now, or `bars` of now.
        width: of the page's 24 columns.
        hint: what to make of it.
        limits: values from which on it is orange, and red; lower ones first, or higher ones when less is worse.
        stacked: whether the series add up.
        minimum: of the axis; None: as the values are.
        maximum: of the axis.
        repeat: a variable: one chart for each of its values.
    """

    title: str
    queries: Sequence[Query]
    unit: str = "short"
    kind: str = "lines"
    width: int = 8
    hint: str = ""
    limits: tuple[float, float] | None = None
    stacked: bool = False
    minimum: float | None = 0
    maximum: float | None = None
    repeat: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """Charts below a heading."""

    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True, slots=True)
class Choice:
    """What a reader chooses above the charts: `$name` in queries.

    Args:
        query: where the values come from.
        regex: which part of an answer is shown, and which is the value.
        several: whether several, or all, may be chosen.
    """

    name: str
    label: str
    query: str
    regex: str = ""
    several: bool = True


@dataclass(frozen=True, slots=True)
class Page:
    """One dashboard."""

    name: str
    title: str
    about: str
    rows: Sequence[Row]
    choices: Sequence[Choice] = ()


def render(page: Page) -> str:
    """The dashboard as Grafana imports it, and its sidecar loads it: JSON, the same for the same page."""
    builder = (
        dashboard.Dashboard(page.title)
        .uid(f"trainyard-{page.name}")
        .description(page.about)
        .tags(["trainyard"])
        .refresh(_REFRESH)
        .time("now-1h", "now")
        .timezone("browser")
        .readonly()
        .with_variable(dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
    )
    for choice in page.choices:
        builder.with_variable(_variable(choice))
    numbers = itertools.count(1)
    for row in page.rows:
        builder.with_row(dashboard.Row(row.title).id(next(numbers)))
        for panel in row.panels:
            builder.with_panel(_built(panel).id(next(numbers)))
    return json.dumps(builder.build(), cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


def _variable(choice: Choice) -> dashboard.QueryVariable:
    variable = (
        dashboard.QueryVariable(choice.name)
        .label(choice.label)
        .query(choice.query)
        .regex(choice.regex)
        .datasource(_SOURCE)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
        .multi(choice.several)
        .include_all(choice.several)
    )
    return variable.all_value(".*") if choice.several else variable


_Builder = timeseries.Panel | stat.Panel | bargauge.Panel


def _built(panel: Panel) -> _Builder:
    builder = _KINDS[panel.kind](panel)
    builder.title(panel.title).description(panel.hint).unit(panel.unit).datasource(_SOURCE)
    builder.span(panel.width).height(_HEIGHT[panel.kind]).thresholds(_thresholds(panel))
    if panel.minimum is not None:
        builder.min(panel.minimum)
    if panel.maximum is not None:
        builder.max(panel.maximum)
    if panel.repeat:
        builder.repeat(panel.repeat).repeat_direction("h")
    for target in _targets(panel):
        builder.with_target(target)
    return builder


def _lines(panel: Panel) -> timeseries.Panel:
    builder = (
        timeseries.Panel()
        .line_width(1)
        .fill_opacity(25 if panel.stacked else 5)
        .show_points(VisibilityMode.NEVER)
        .legend(
            common.VizLegendOptions()
            .show_legend(True)
            .display_mode(LegendDisplayMode.LIST)
            .placement(LegendPlacement.BOTTOM)
        )
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
    )
    return builder.stacking(common.StackingConfig().mode(StackingMode.NORMAL)) if panel.stacked else builder


def _number(panel: Panel) -> stat.Panel:
    colored = BigValueColorMode.VALUE if panel.limits else BigValueColorMode.NONE
    newest = common.ReduceDataOptions().calcs(["lastNotNull"])
    return stat.Panel().color_mode(colored).graph_mode(BigValueGraphMode.NONE).reduce_options(newest)


def _bars(_panel: Panel) -> bargauge.Panel:
    newest = common.ReduceDataOptions().calcs(["lastNotNull"])
    return bargauge.Panel().orientation(VizOrientation.HORIZONTAL).reduce_options(newest)


_KINDS: dict[str, Callable[[Panel], _Builder]] = {"lines": _lines, "number": _number, "bars": _bars}


def _thresholds(panel: Panel) -> dashboard.ThresholdsConfig:
    config = dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE)
    if panel.limits is None:
        return config.steps([Threshold(value=None, color="green")])
    worse, worst = panel.limits
    if worst >= worse:
        steps = [(None, "green"), (worse, "orange"), (worst, "red")]
    else:
        steps = [(None, "red"), (worst, "orange"), (worse, "green")]
    return config.steps([Threshold(value=value, color=color) for value, color in steps])


def _targets(panel: Panel) -> Iterator[prometheus.Dataquery]:
    for letter, query in zip("ABCDEFGH", panel.queries, strict=False):
        target = prometheus.Dataquery().ref_id(letter).expr(query.expr).legend_format(query.legend).datasource(_SOURCE)
        yield target.range() if panel.kind == "lines" else target.instant()
