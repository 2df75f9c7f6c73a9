"""Runs as a program wants them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainyard_protos.v1 import metrics_pb2


@dataclass(frozen=True, slots=True)
class Run:
    """What metrics stores for one attempt of a job, or for one plain script.

    Attributes:
        id: of the run; of a job's run the id of its attempt.
        job_id: "" for a plain script.
        attempt: number of the attempt; 0 for a plain script.
        created_ns, updated_ns: UTC, nanoseconds; `updated_ns` is the time of its newest point, 0 before the first.
        params: what the script recorded of itself, as nested mappings.
        spec: what its job asked for, as nested mappings, with the job's `labels`, and of `env` the names; {} for a
            plain script.
        context: code (`git`, `code`), host and environment; {} when it was not asked for.
        values: last value of each series that was asked for, of its lowest rank.
        steps: step of each of these values.
    """

    id: str
    name: str
    job_id: str = ""
    attempt: int = 0
    created_ns: int = 0
    updated_ns: int = 0
    params: Mapping[str, Any] = field(default_factory=dict)
    spec: Mapping[str, Any] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    notes: str = ""
    context: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, float] = field(default_factory=dict)
    steps: Mapping[str, int] = field(default_factory=dict)

    @property
    def git(self) -> Mapping[str, Any]:
        """Facts of its code; {} when there are none. Whoever opens a run writes its context, also nonsense."""
        facts = self.context.get("git")
        return facts if isinstance(facts, Mapping) else {}

    @property
    def code(self) -> Mapping[str, Any]:
        """The artifact that has its code: `artifact`, `version`, `digest`; {} when none is known.

        Runs from before digests were recorded have the reference that their spec names, and no more.
        """
        facts = self.context.get("code")
        if isinstance(facts, Mapping):
            return facts
        source = self.spec.get("code")
        named = source.get("artifact") if isinstance(source, Mapping) else None
        return {"artifact": named} if isinstance(named, str) else {}


def run_of(found: metrics_pb2.FoundRun, names: Sequence[str] = ()) -> Run:
    """A run as the service describes it.

    Args:
        names: those of the request, which the values belong to in this order.
    """
    run = found.run
    has = [(index, name) for index, name in enumerate(names) if found.count[index]]
    return Run(
        id=run.id,
        name=run.name,
        job_id=run.job_id,
        attempt=run.fence,
        created_ns=run.created_ns,
        updated_ns=found.updated_ns,
        params=json.loads(run.params or "{}"),
        spec=json.loads(run.spec or "{}"),
        tags=dict(run.tags),
        notes=run.notes,
        context=json.loads(run.context or "{}"),
        values={name: found.last_value[index] for index, name in has},
        steps={name: found.last_step[index] for index, name in has},
    )
