"""The dashboards are what the code renders, and every query of every panel finds series in a yard at work."""

import json
import subprocess
import sys

import pytest

from scripts.grafana.__main__ import FOLDER, differing, write
from tests.conftest import REPOSITORY

FILES = sorted(FOLDER.glob("*.json"))
# An interval that holds several scrapes; what a reader would have chosen.
CHOSEN = {"$__rate_interval": "30s", "$__range": "15m", "$pool": ".*", "$queue": ".*", "$value": "loss"}


def panels():
    """Every query of every panel: which dashboard, which panel, the query, and whether it is shown over time."""
    for path in FILES:
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", []):
                name = f"{path.stem}: {panel['title']} {target['refId']}"
                yield pytest.param(target["expr"], target["range"], id=name)


def filled(expr, job):
    for variable, value in (CHOSEN | {"$job": job}).items():
        expr = expr.replace(variable, value)
    assert "$" not in expr, f"a variable that no dashboard offers: {expr}"
    return expr


def test_there_is_a_dashboard_for_cluster_queues_one_job_and_services():
    assert [path.stem for path in FILES] == ["cluster", "job", "queues", "services"]


def test_what_is_checked_in_is_what_the_code_renders():
    checked = subprocess.run(
        [sys.executable, "-m", "scripts.grafana", "--check"], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stderr


def test_a_file_that_differs_is_named(tmp_path):
    write(tmp_path)
    assert differing(tmp_path) == []
    (tmp_path / "job.json").write_text("{}")
    (tmp_path / "other.json").write_text("{}")
    assert differing(tmp_path) == ["job.json", "other.json"]
    write(tmp_path)
    assert differing(tmp_path) == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_dashboard_is_whole(path):
    page = json.loads(path.read_text())
    numbers = [panel["id"] for panel in page["panels"]]
    assert page["uid"] == f"trainyard-{path.stem}"
    assert len(set(numbers)) == len(numbers)
    for panel in page["panels"]:
        box = panel["gridPos"]
        assert box["x"] + box["w"] <= 24
        assert panel["type"] == "row" or (panel["targets"] and panel["title"])


@pytest.mark.parametrize(("expr", "over_time"), [*panels()])
def test_every_panel_shows_a_yard_at_work(watched, expr, over_time):
    watched.until_shown(filled(expr, watched.job.id), over_time=over_time)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_a_reader_chooses_from_is_there(watched, path):
    for choice in json.loads(path.read_text())["templating"]["list"]:
        kind, _, rest = str(choice["query"]).partition("(")
        if kind == "label_values":
            series, _, label = filled(rest.removesuffix(")"), watched.job.id).rpartition(", ")
            watched.until_shown(f"count by ({label}) ({series})")
        elif kind == "query_result":
            watched.until_shown(filled(rest.removesuffix(")"), watched.job.id))
