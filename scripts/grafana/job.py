"""One job: how far it is, what it tracks, what its workers use."""

from __future__ import annotations

from scripts.grafana.parts import Choice, Page, Panel, Query, Row

_JOB = 'job="$job"'


def _value(names: str) -> str:
    return f"trainyard_run_value{{{_JOB}, name=~{names}}}"


def _number(title: str, expr: str, unit: str = "short", hint: str = "") -> Panel:
    return Panel(title, [Query(expr)], unit=unit, kind="number", width=6, hint=hint)


_NOW = Row(
    "Progress",
    [
        _number("Step", f"max(trainyard_run_step{{{_JOB}}})"),
        _number(
            "Attempts",
            f"count(count by (attempt) (trainyard_run_updated_seconds{{{_JOB}}}))",
            hint="Of which values were seen lately.",
        ),
        _number(
            "Since its newest value",
            f"time() - max(trainyard_run_updated_seconds{{{_JOB}}})",
            unit="s",
        ),
        _number(
            "Silence of its agents",
            f"max(last_over_time(trainyard_attempt_silence_seconds{{{_JOB}}}[$__range]))",
            unit="s",
            hint="Of the most silent one. Nothing, once the job is over.",
        ),
        Panel(
            "Step over time",
            [Query(f"max by (attempt) (trainyard_run_step{{{_JOB}}})", "attempt {{attempt}}")],
            width=12,
            hint="An attempt that resumes goes on at its checkpoint's step.",
        ),
        Panel(
            "Steps per second",
            [Query(f"max by (attempt) (deriv(trainyard_run_step{{{_JOB}}}[$__rate_interval]))", "attempt {{attempt}}")],
            width=12,
        ),
    ],
)
_VALUES = Row(
    "What it tracks",
    [
        Panel(
            "$value",
            [Query(_value('"$value"'), "rank {{rank}}, attempt {{attempt}}")],
            minimum=None,
            repeat="value",
            hint="The newest value at each scrape. Every single one is in 'yard metrics'.",
        )
    ],
)
_SYSTEM = Row(
    "What its workers use",
    [
        Panel(
            "Processors",
            [Query(_value('"system/cpu|system/gpu[0-9]+"'), "rank {{rank}} {{name}}")],
            width=12,
            hint="Cores that a worker and its children use; of a GPU, the share of time it was busy.",
        ),
        Panel(
            "Memory",
            [Query(_value('"system/memory_bytes|system/gpu[0-9]+_memory_bytes"'), "rank {{rank}} {{name}}")],
            unit="bytes",
            width=12,
        ),
    ],
)

PAGE = Page(
    name="job",
    title="Trainyard / Job",
    about="How far one job is, what it tracks, what its workers use.",
    choices=[
        Choice(
            "job",
            "Job",
            "query_result(max by (job, job_name) (max_over_time(trainyard_attempt_silence_seconds[$__range])))",
            regex='/job="(?<value>[^"]+)", job_name="(?<text>[^"]+)"/',
            several=False,
        ),
        Choice("value", "Value", f'label_values(trainyard_run_value{{{_JOB}, name!~"system/.*"}}, name)'),
    ],
    rows=[_NOW, _VALUES, _SYSTEM],
)
