"""The queues: who waits, for what, and for how long."""

from __future__ import annotations

from scripts.grafana.parts import Choice, Page, Panel, Query, Row

_QUEUE = 'queue=~"$queue"'
_WAITED = "sum by (le) (rate(trainyard_admission_seconds_bucket[$__rate_interval]))"


def _waiting(title: str, what: str, hint: str, limits: tuple[float, float] | None = None) -> Panel:
    expr = f'sum(trainyard_queue_jobs{{{_QUEUE}, waits_for="{what}"}})'
    return Panel(title, [Query(expr)], kind="number", width=6, hint=hint, limits=limits)


_NOW = Row(
    "Now",
    [
        _waiting("Wait for room", "room", "They stand in line, by priority and then by age."),
        _waiting("Back off", "backoff", "They failed, and are tried again after a while."),
        _waiting(
            "Fit nowhere",
            "larger pool",
            "No pool that is alive could ever hold them: 'yard explain JOB' says what is lacking.",
            limits=(1, 1),
        ),
        Panel(
            "Oldest wait",
            [Query(f"max(trainyard_queue_oldest_seconds{{{_QUEUE}}})")],
            unit="s",
            kind="number",
            width=6,
            hint="How long the oldest job that could run has waited for room.",
        ),
    ],
)
_OVER_TIME = Row(
    "Over time",
    [
        Panel(
            "Waiting jobs",
            [Query(f"sum by (queue, waits_for) (trainyard_queue_jobs{{{_QUEUE}}})", "{{queue}}: {{waits_for}}")],
            width=12,
            stacked=True,
        ),
        Panel(
            "Oldest wait by queue",
            [Query(f"max by (queue) (trainyard_queue_oldest_seconds{{{_QUEUE}}})", "{{queue}}")],
            unit="s",
            width=12,
        ),
    ],
)
_FLOW = Row(
    "Flow",
    [
        Panel(
            "Jobs by state",
            [Query('sum by (state) (trainyard_jobs{state!~"succeeded|failed|cancelled"})', "{{state}}")],
            stacked=True,
        ),
        Panel(
            "Admitted and ended, per minute",
            [
                Query("60 * sum(rate(trainyard_admissions_total[$__rate_interval]))", "admitted"),
                Query("60 * sum by (state) (rate(trainyard_jobs_ended_total[$__rate_interval]))", "{{state}}"),
            ],
        ),
        Panel(
            "Time to the first admission",
            [
                Query(f"histogram_quantile(0.5, {_WAITED})", "half of the jobs"),
                Query(f"histogram_quantile(0.95, {_WAITED})", "95 of 100"),
            ],
            unit="s",
            hint="From submission until machines were given, of jobs that were admitted then.",
        ),
    ],
)

PAGE = Page(
    name="queues",
    title="Trainyard / Queues",
    about="Who waits, for what, and for how long.",
    choices=[Choice("queue", "Queue", "label_values(trainyard_queue_jobs, queue)")],
    rows=[_NOW, _OVER_TIME, _FLOW],
)
