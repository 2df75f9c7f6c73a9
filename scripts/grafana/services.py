"""The services: whether they serve, how fast, and what waits in them."""

from __future__ import annotations

from scripts.grafana.parts import Page, Panel, Query, Row


def _rate(counter: str, by: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} (rate({counter}[$__rate_interval]))"


def _quantile(share: float, histogram: str, by: str = "") -> str:
    labels = f"{by}, le" if by else "le"
    return f"histogram_quantile({share}, {_rate(f'{histogram}_bucket', labels)})"


_HEALTH = Row(
    "Health",
    [
        Panel(
            "Ready",
            [Query("max by (service) (trainyard_ready)", "{{service}}")],
            kind="number",
            width=12,
            hint="1 while one of the processes serves.",
            limits=(1, 0.5),
        ),
        Panel(
            "Days until a certificate ends",
            [Query("min by (instance) (trainyard_certificate_expiry_seconds - time()) / 86400", "{{instance}}")],
            kind="number",
            width=12,
            hint="Of what a process serves with: one that was renewed counts after a restart.",
            limits=(21, 7),
        ),
    ],
)
_CALLS = Row(
    "Calls",
    [
        Panel("Calls per second", [Query(_rate("trainyard_grpc_calls_total", "method"), "{{method}}")], unit="reqps"),
        Panel(
            "Refused and failed, per second",
            [Query(_rate('trainyard_grpc_calls_total{code!="OK"}', "method, code"), "{{method}} {{code}}")],
            unit="reqps",
        ),
        Panel(
            "Slowest of 100 calls",
            [Query(_quantile(0.99, "trainyard_grpc_call_seconds", "method"), "{{method}}")],
            unit="s",
        ),
    ],
)
_PROCESSES = Row(
    "Processes",
    [
        Panel(
            "CPU cores",
            [
                Query(
                    "rate(process_cpu_seconds_total[$__rate_interval]) and on (instance) trainyard_ready",
                    "{{instance}}",
                )
            ],
            width=6,
        ),
        Panel(
            "Memory",
            [Query("process_resident_memory_bytes and on (instance) trainyard_ready", "{{instance}}")],
            unit="bytes",
            width=6,
        ),
        Panel(
            "Open files",
            [Query("process_open_fds and on (instance) trainyard_ready", "{{instance}}")],
            width=6,
        ),
        Panel(
            "Free on disk",
            [Query("trainyard_disk_free_bytes / trainyard_disk_size_bytes", "{{instance}}")],
            unit="percentunit",
            width=6,
            maximum=1,
        ),
    ],
)
_METRICS = Row(
    "Metrics",
    [
        Panel("Points per second", [Query(_rate("trainyard_metrics_points_total"), "stored")], width=6),
        Panel(
            "Time until durable",
            [
                Query(_quantile(0.5, "trainyard_metrics_durable_seconds"), "half of the batches"),
                Query(_quantile(0.99, "trainyard_metrics_durable_seconds"), "99 of 100"),
            ],
            unit="s",
            width=6,
        ),
        Panel(
            "Waits to be stored",
            [
                Query("sum(trainyard_metrics_waiting_bytes)", "waits"),
                Query("sum(trainyard_metrics_waiting_bytes_limit)", "no more is read beyond"),
            ],
            unit="bytes",
            width=6,
        ),
        Panel(
            "Runs",
            [
                Query("sum(trainyard_metrics_open_runs)", "open"),
                Query("sum(trainyard_metrics_compactions_waiting)", "wait for compaction"),
                Query("sum(trainyard_run_series_left_out)", "series that Prometheus is not shown"),
            ],
            width=6,
        ),
    ],
)
_ARTIFACTS = Row(
    "Artifacts",
    [
        Panel(
            "Bytes per second",
            [
                Query(_rate("trainyard_artifact_received_bytes_total"), "received"),
                Query(_rate("trainyard_artifact_sent_bytes_total"), "sent"),
            ],
            unit="Bps",
        ),
        Panel(
            "Versions made, per minute",
            [Query(f"60 * {_rate('trainyard_artifact_versions_total', 'kind')}", "{{kind}}")],
            hint="Checkpoints, outputs, code.",
        ),
        Panel(
            "On their way to disk",
            [Query("sum(trainyard_artifact_receiving_bytes)", "chunks in memory")],
            unit="bytes",
        ),
    ],
)
_TROUBLE = Row(
    "Trouble",
    [
        Panel(
            "Damaged, since the start",
            [
                Query("sum(trainyard_metrics_damaged_total)", "files of metrics"),
                Query("sum(trainyard_artifact_chunks_damaged_total)", "chunks"),
            ],
            hint="'yard admin verify --repair' saves what can be saved.",
        ),
        Panel(
            "Failed, per minute",
            [
                Query(
                    f"60 * {_rate('trainyard_metrics_write_errors_total', 'reason')}", "writes of metrics: {{reason}}"
                ),
                Query(f"60 * {_rate('trainyard_metrics_compactions_failed_total')}", "compactions"),
                Query(f"60 * {_rate('trainyard_artifact_collections_failed_total')}", "collections of garbage"),
            ],
        ),
        Panel(
            "Messages to launchers that wait",
            [Query("sum(trainyard_outbox_backlog)", "in the outbox")],
            hint="Without Redis they wait; nothing is lost.",
        ),
    ],
)

PAGE = Page(
    name="services",
    title="Trainyard / Services",
    about="Whether the services serve, how fast, and what waits in them.",
    rows=[_HEALTH, _CALLS, _PROCESSES, _METRICS, _ARTIFACTS, _TROUBLE],
)
