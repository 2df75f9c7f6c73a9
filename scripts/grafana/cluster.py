"""The cluster: its machines, what is given of them, and what runs there."""

from __future__ import annotations

from scripts.grafana.parts import Choice, Page, Panel, Query, Row

_POOL = 'pool=~"$pool"'


def _of(name: str, resource: str) -> str:
    return f'{name}{{{_POOL}, resource="{resource}"}}'


def _capacity(resource: str) -> str:
    return f"sum({_of('trainyard_machine_capacity', resource)})"


def _given(resource: str) -> str:
    return f"{_capacity(resource)} - sum({_of('trainyard_machine_free', resource)})"


def _number(title: str, expr: str, hint: str = "", limits: tuple[float, float] | None = None) -> Panel:
    return Panel(title, [Query(expr)], kind="number", width=4, hint=hint, limits=limits)


def _use(title: str, resource: str, unit: str = "short") -> Panel:
    return Panel(
        title,
        [Query(_given(resource), "given to jobs"), Query(_capacity(resource), "there are")],
        unit=unit,
        hint="What jobs asked for, not what they use: that is on the page of the job.",
    )


_NOW = Row(
    "Now",
    [
        _number("Machines", f"count(count by (pool, machine) (trainyard_machine_capacity{{{_POOL}}}))"),
        _number("Running jobs", 'sum(trainyard_jobs{state=~"starting|running|stopping|finalizing"})'),
        _number("Queued jobs", 'sum(trainyard_jobs{state="queued"})'),
        _number("GPUs given", _given("gpu")),
        _number("GPUs", _capacity("gpu")),
        _number(
            "Silent pools",
            f"sum(1 - trainyard_pool_alive{{{_POOL}}})",
            hint="Pools whose launcher is not heard of: they take no new work.",
            limits=(1, 1),
        ),
    ],
)
_CAPACITY = Row(
    "Capacity",
    [_use("CPU cores", "cpu"), _use("Memory", "memory", "bytes"), _use("GPUs in use", "gpu")],
)
_FREE = " / ".join(f'trainyard_machine_{what}{{{_POOL}, resource="cpu"}}' for what in ("free", "capacity"))
_MACHINES = Row(
    "Machines and attempts",
    [
        Panel(
            "Cores given, by machine",
            [Query(f"1 - {_FREE}", "{{machine}}")],
            unit="percentunit",
            kind="bars",
            maximum=1,
        ),
        Panel(
            "Attempts by phase",
            [Query(f"sum by (phase) (trainyard_launcher_attempts{{{_POOL}}})", "{{phase}}")],
            stacked=True,
        ),
        Panel(
            "Silence of agents",
            [Query("max by (job_name, attempt) (trainyard_attempt_silence_seconds)", "{{job_name}} #{{attempt}}")],
            unit="s",
            hint="Agents speak every few seconds. One that stays silent is given up.",
        ),
    ],
)
_ENDS = Row(
    "Ends of attempts",
    [
        Panel(
            "Ended, per minute, by reason",
            [
                Query(
                    f"60 * sum by (reason) (rate(trainyard_attempts_ended_total{{{_POOL}}}[$__rate_interval])) > 0",
                    "{{reason}}",
                )
            ],
            width=12,
            stacked=True,
        ),
        Panel(
            "Failed launches, per minute, by pool",
            [
                Query(
                    "60 * sum by (pool) (rate(trainyard_attempts_ended_total"
                    f'{{{_POOL}, ran="no", reason!~"Cancelled|Stopped|DeadlineExceeded"}}[$__rate_interval]))',
                    "{{pool}}",
                )
            ],
            width=12,
            hint="Attempts that ended before any of their workers ran.",
        ),
    ],
)

PAGE = Page(
    name="cluster",
    title="Trainyard / Cluster",
    about="Machines, what is given of them, and what runs there.",
    choices=[Choice("pool", "Pool", "label_values(trainyard_pool_alive, pool)")],
    rows=[_NOW, _CAPACITY, _MACHINES, _ENDS],
)
