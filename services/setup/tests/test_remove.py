"""What a removal does to resources, which stay."""

from __future__ import annotations

from typing import Any

import pytest
from trainyard_setup.cluster import released

FINALIZER, OPERATOR = "trainyard.dev/job", "trainyard.dev/operator"


def resource(operator: str, *finalizers: str, **status: str) -> dict[str, Any]:
    annotations = {OPERATOR: operator} if operator else {}
    return {"metadata": {"uid": "u-1", "finalizers": [*finalizers], "annotations": annotations}, "status": status}


def test_what_never_became_a_job_is_free_for_another_operator() -> None:
    mine = resource("ours/u-1", "other", FINALIZER)
    assert released(mine, "ours") == {"metadata": {"finalizers": ["other"], "annotations": {OPERATOR: None}}}


def test_what_became_a_job_waits_for_its_operators_next_installation() -> None:
    mine = resource("ours/u-1", FINALIZER, jobId="j-1")
    assert released(mine, "ours") == {"metadata": {"finalizers": []}}


@pytest.mark.parametrize("operator", ["", "theirs/u-0"])
def test_what_no_operator_took_is_let_go(operator: str) -> None:
    assert released(resource(operator, FINALIZER, jobId="j-1"), "ours") == {"metadata": {"finalizers": []}}


@pytest.mark.parametrize("kept", [resource("theirs/u-1", FINALIZER), resource("ours/u-1", "other"), resource("")])
def test_what_is_another_operators_or_free_is_left_as_it_is(kept: dict[str, Any]) -> None:
    assert released(kept, "ours") == {}
