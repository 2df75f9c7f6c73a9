"""What the scheduler keeps of a spec beside its text: how long, how often, under which rules, on which machines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from trainyard.spec import TrainingJob
from trainyard.spec.quantities import seconds

from trainyard_scheduler.domain.matching import NO_WISHES, Toleration, Wishes
from trainyard_scheduler.domain.retries import Action, RetryPolicy, Rule


@dataclass(frozen=True, slots=True)
class JobPolicy:
    """Durations are seconds; None where the spec sets no limit."""

    retries: RetryPolicy
    grace_s: float
    deadline_s: float | None = None
    ttl_s: float | None = None
    wishes: Wishes = NO_WISHES


def policy_json(job: TrainingJob) -> str:
    """The policy of a spec, in the form `read_policy` takes."""
    spec = job.spec
    rules = [
        {
            "action": rule.action,
            "exit_codes": list(rule.exit_codes or ()),
            "signals": list(rule.signals or ()),
            "reasons": list(rule.reasons or ()),
            "log_pattern": rule.log_pattern or "",
        }
        for rule in spec.retries.rules
    ]
    return json.dumps(
        {
            "limit": spec.retries.limit,
            "backoff_s": seconds(spec.retries.backoff),
            "rules": rules,
            "grace_s": seconds(spec.grace_period),
            "deadline_s": seconds(spec.deadline) if spec.deadline else None,
            "ttl_s": seconds(spec.ttl) if spec.ttl else None,
        }
        | placement(spec.kubernetes.model_dump(by_alias=True) if spec.kubernetes else {})
    )


def placement(kubernetes: Mapping[str, Any]) -> dict[str, Any]:
    """The part of the policy that says on which machines, from `spec.kubernetes`; {} when it does not matter."""
    tolerations = [
        [each.get("key") or "", each.get("operator") or "Equal", each.get("value") or "", each.get("effect") or ""]
        for each in kubernetes.get("tolerations") or ()
    ]
    found = {
        "selector": sorted((kubernetes.get("nodeSelector") or {}).items()),
        "tolerations": tolerations,
        "topology": kubernetes.get("topology") or "",
    }
    return {"placement": found} if any(found.values()) else {}


@lru_cache(maxsize=256)
def read_policy(text: str) -> JobPolicy:
    """A policy, from its column."""
    fields = json.loads(text)
    rules = tuple(
        Rule(
            Action(rule["action"]),
            frozenset(rule["exit_codes"]),
            frozenset(rule["signals"]),
            frozenset(rule["reasons"]),
            rule["log_pattern"],
        )
        for rule in fields["rules"]
    )
    retries = RetryPolicy(fields["limit"], fields["backoff_s"], rules)
    return JobPolicy(
        retries, fields["grace_s"], fields["deadline_s"], fields["ttl_s"], _wishes(fields.get("placement"))
    )


def _wishes(found: Mapping[str, Any] | None) -> Wishes:
    if found is None:
        return NO_WISHES
    return Wishes(
        tuple((key, value) for key, value in found["selector"]),
        tuple(Toleration(*each) for each in found["tolerations"]),
        found["topology"],
    )
