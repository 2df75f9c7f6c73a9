"""Prometheus, which watches a yard."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from scripts.testbed import fetch
from scripts.testbed.server import Server

_TIMEOUT_S = 60.0


def prometheus() -> fetch.Program:
    """The server; `promtool` is beside it.

    Raises:
        fetch.Unavailable: it cannot be had on this machine.
    """
    return fetch.debian("prometheus", "/usr/bin/prometheus")


@dataclass(frozen=True, slots=True)
class Scrape:
    """What is asked for its metrics.

    Args:
        name: of the group of targets.
        targets: `host:port` each.
        token_file: holds what they ask for.
        ca_file: root certificate that theirs is checked against; without, they are asked over plain HTTP.
    """

    name: str
    targets: Sequence[str]
    token_file: Path
    ca_file: Path | None = None

    def configuration(self) -> dict[str, object]:
        """As Prometheus reads it. The yard's series bring labels such as `job` of their own, which are kept."""
        scheme: dict[str, object] = {"scheme": "http"}
        if self.ca_file is not None:
            scheme = {"scheme": "https", "tls_config": {"ca_file": str(self.ca_file)}}
        return {
            "job_name": self.name,
            "honor_labels": True,
            "authorization": {"credentials_file": str(self.token_file)},
            "static_configs": [{"targets": list(self.targets)}],
            **scheme,
        }


class Prometheus(Server):
    """Scrapes at a short interval and evaluates rules.

    Args:
        scrapes: whom it asks.
        rules: files of rules.
        interval_s: between two scrapes, and between two evaluations.
    """

    name = "prometheus"

    def __init__(
        self,
        folder: Path,
        scrapes: Sequence[Scrape],
        rules: Sequence[Path] = (),
        *,
        interval_s: int = 1,
        port: int = 0,
    ) -> None:
        super().__init__(folder, port)
        self._program = prometheus()
        self._configuration = {
            "global": {"scrape_interval": f"{interval_s}s", "evaluation_interval": f"{interval_s}s"},
            "rule_files": [str(path) for path in rules],
            "scrape_configs": [scrape.configuration() for scrape in scrapes],
        }

    def prepare(self) -> None:
        (self.folder / "prometheus.yml").write_text(yaml.safe_dump(self._configuration))

    def command(self) -> list[str]:
        return [
            str(self._program.path),
            "--config.file=prometheus.yml",
            "--storage.tsdb.path=data",
            f"--web.listen-address=127.0.0.1:{self.port}",
            "--log.level=warn",
        ]

    def environ(self) -> Mapping[str, str]:
        # It takes all cores otherwise, in the middle of what it watches.
        return {**self._program.environ(), "GOMAXPROCS": os.environ.get("GOMAXPROCS", "1")}

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/-/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def query(self, expr: str) -> list[dict[str, Any]]:
        """Series of an expression as of now: `metric` (labels) and `value` (time, text).

        Raises:
            ValueError: Prometheus refused it; the message says why.
        """
        return list(self._get("query", query=expr)["result"])

    def query_range(self, expr: str, start: float, end: float, step_s: float) -> list[dict[str, Any]]:
        """Series of an expression over a time (Unix seconds), as a chart shows them: `metric` and `values`.

        Raises:
            ValueError: as for `query`.
        """
        return list(self._get("query_range", query=expr, start=start, end=end, step=step_s)["result"])

    def targets(self) -> list[dict[str, Any]]:
        """Whom it scrapes: `scrapePool`, `health` ("up", "down" or "unknown"), `lastError`."""
        return list(self._get("targets")["activeTargets"])

    def alerts(self) -> list[dict[str, Any]]:
        """What is pending or fires: `labels`, `annotations`, `state`."""
        return list(self._get("alerts")["alerts"])

    def _get(self, what: str, **parameters: object) -> dict[str, Any]:
        url = f"http://127.0.0.1:{self.port}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
                return dict(json.load(answer)["data"])
        except urllib.error.HTTPError as error:
            with error:
                raise ValueError(f"{what} {parameters}: {error.read().decode()}") from error
