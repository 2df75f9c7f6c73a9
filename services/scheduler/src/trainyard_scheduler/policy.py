"""What the scheduler keeps of a spec beside its text: how long, how often, under which rules."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache

from trainyard.spec import TrainingJob
from trainyard.spec.quantities import seconds

from trainyard_scheduler.domain.retries import Action, RetryPolicy, Rule


@dataclass(frozen=True, slots=True)
class JobPolicy:
    """Durations are seconds; None where the spec sets no limit."""

    retries: RetryPolicy
    grace_s: float
    deadline_s: float | None = None
    ttl_s: float | None = None


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
    )


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
    return JobPolicy(retries, fields["grace_s"], fields["deadline_s"], fields["ttl_s"])
