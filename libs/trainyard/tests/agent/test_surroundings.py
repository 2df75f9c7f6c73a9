"""What an agent reports of its surroundings when its workers start."""

from __future__ import annotations

import json
import os
import resource

import pytest
from trainyard.agent import surroundings
from trainyard.agent.facts import context
from trainyard.agent.plan import Plan


def plan(gpus: int = 0, nodes: int = 2, **volume: object) -> Plan:
    volume = {"name": "data", "mountPath": "/proc", "persistentVolumeClaim": "datasets"} | volume
    job = {"spec": {"kubernetes": {"volumes": [volume]}}}
    return Plan({"attempt_id": "a", "gpus_per_worker": gpus, "nodes": nodes, "spec_json": json.dumps(job)})


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (65536, 65536))


def test_a_limit_of_locked_memory_is_reported_to_jobs_with_gpus_on_several_nodes_and_recorded_with_every_run(
    limit: None,
) -> None:
    [(reason, text)] = surroundings.problems(plan(gpus=1, readOnly=True))
    assert reason == "MemlockLimited"
    assert "64 KiB" in text and "LimitMEMLOCK=infinity" in text
    assert list(surroundings.problems(plan(readOnly=True))) == []
    assert list(surroundings.problems(plan(gpus=1, nodes=1, readOnly=True))) == []
    assert context()["memlock"] == 65536


def test_no_limit_is_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert list(surroundings.problems(plan(gpus=1, readOnly=True))) == []
    assert context()["memlock"] == "unlimited"


def test_a_volume_that_workers_cannot_write_to_is_reported_unless_it_is_read_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    [(reason, text)] = surroundings.problems(plan())
    assert reason == "VolumeNotWritable"
    for word in ("'data' at /proc", "fsGroup", "runAsUser", "readOnly: true", f"user {os.getuid()}"):
        assert word in text
    assert list(surroundings.problems(plan(readOnly=True))) == []
    assert list(surroundings.problems(plan(mountPath="/no/such/mount"))) == [], "on one machine nothing is mounted"
    assert list(surroundings.problems(plan(persistentVolumeClaim=None, secret="keys"))) == [], "always read-only"
