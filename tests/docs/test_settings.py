"""Every setting of every service is explained."""

import pytest

from tests.conftest import REPOSITORY

PAGE = (REPOSITORY / "docs" / "reference" / "settings.md").read_text()
ROWS = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith(("| `TRAINYARD", "| `--"))]


def test_the_page_has_the_settings_of_all_services():
    for service in ("SCHEDULER", "LAUNCHER", "METRICS", "ARTIFACTS", "SERVICE"):
        assert any(f"TRAINYARD_{service}_" in row[0] + row[1] for row in ROWS), service


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip("`"))
def test_a_setting_has_a_default_and_a_meaning(row):
    assert len(row) == 4, f"{row[0]} has no text below its field"
    assert row[1]
    assert len(row[3].split()) >= 3
