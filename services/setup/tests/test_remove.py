"""What a removal does to resources, which stay."""

from __future__ import annotations

from typing import Any

import pytest
from trainyard_setup.cluster import released
from trainyard_setup.final_status import of_uninstalled

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


def running(**status: Any) -> dict[str, Any]:
    held = {"type": "Running", "status": "True", "lastTransitionTime": "then"}
    open_ = {"type": "Finished", "status": "False", "lastTransitionTime": "then"}
    failed = {"type": "Failed", "status": "False", "lastTransitionTime": "then"}
    said = {"jobId": "j-1", "phase": "Running", "timeLeft": "3m", "conditions": [held, open_, failed]}
    return {"metadata": {"uid": "u-1", "generation": 2}, "status": said | status}


def test_what_ran_says_that_nothing_of_it_runs_and_what_to_do() -> None:
    said = of_uninstalled(running(), "platform-yard", "now")["status"]
    assert (said["phase"], said["reason"], said["timeLeft"]) == ("Unmanaged", "OperatorUninstalled", None)
    assert "'platform-yard' was uninstalled" in said["message"]
    assert {each["type"]: (each["status"], each["lastTransitionTime"]) for each in said["conditions"]} == {
        "Running": ("False", "now"),
        "Finished": ("True", "now"),
        "Succeeded": ("False", "now"),
        "Failed": ("False", "then"),
    }


@pytest.mark.parametrize(
    "status", [{"phase": "Succeeded"}, {"phase": "Refused"}, {"phase": "Unmanaged"}, {"jobId": ""}]
)
def test_what_is_over_or_never_became_a_job_keeps_its_status(status: dict[str, Any]) -> None:
    assert of_uninstalled(running(**status), "platform-yard", "now") == {}
