"""What the API server checks of a resource beyond its schema: the models' checks, in the Common Expression Language.

Each rule says in words what the check of the models says, for whoever gets it from `kubectl apply`. A check that has no
rule here (the length of a duration, the syntax of a log pattern) is still made by the scheduler, and then told in the
status of the resource.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from trainyard.credentials import CREDENTIAL_VARIABLE, PASSWORD_IN_URL, URL_OF_A_USER, USER_OR_QUERY_IN_URL
from trainyard.spec import quantities
from trainyard.spec.fields import (
    CREDENTIAL_REMEDY,
    CREDENTIALS_WORDS,
    MOUNT,
    RELATIVE,
    RESERVED_MOUNTS,
)
from trainyard.spec.model import TORCHRUN_VARIABLES

Schema = dict[str, Any]
VALIDATIONS: Final = "x-kubernetes-validations"


@dataclass(frozen=True, slots=True)
class Rule:
    """An expression over `self` that has to hold, what to say when it does not, and the field below that is meant."""

    expression: str
    message: str
    field: str = ""

    def schema(self) -> Schema:
        """As a schema has it."""
        found = {"rule": self.expression, "message": self.message}
        return found | ({"fieldPath": f".{self.field}"} if self.field else {})


def exactly_one(names: list[str]) -> Rule:
    """Exactly one of these fields is given."""
    given = ", ".join(f"has(self.{name})" for name in names)
    return Rule(f"[{given}].filter(given, given).size() == 1", f"has to have exactly one of {', '.join(names)}")


def _literal(values: object) -> str:
    return f"[{', '.join(repr(value) for value in sorted(values))}]"  # type: ignore[call-overload]


def _amount(least: str, most: str, words: str) -> Rule:
    amount = "quantity(string(self))"
    return Rule(
        f"{amount}.compareTo(quantity('{least}')) >= 0 && {amount}.compareTo(quantity('{most}')) <= 0",
        f"has to be {words}",
    )


_NO_PARENTS = Rule("!self.split('/').exists(step, step == '..')", "has to be a path without '..'")
_USERS_OWN = "variables that begin with TRAINYARD_ are set by the yard: take another name"

OF_PATTERN: Final[dict[str, tuple[Rule, ...]]] = {
    RELATIVE: (_NO_PARENTS,),
    MOUNT: (_NO_PARENTS,),
    quantities.CPU_PATTERN: (_amount("1m", "4096", "1m to 4096 cores"),),
    quantities.MEMORY_PATTERN: (_amount("1Mi", "1Pi", '"1Mi" to "1Pi"'),),
}
"""Rules of every text with this pattern."""

OF_PATH: Final[dict[str, tuple[Rule, ...]]] = {
    "": (
        Rule(
            "self.metadata.name.size() <= 63 && self.metadata.name.matches('^[a-z0-9]([a-z0-9-]*[a-z0-9])?$')",
            "metadata.name has to be lower-case letters, digits and '-', at most 63 characters",
        ),
        Rule(
            "!has(oldSelf.status) || !has(oldSelf.status.jobId) || self.spec == oldSelf.spec",
            "the spec of a job that was submitted does not change: delete the resource and apply it anew",
            "spec",
        ),
    ),
    "spec": (
        Rule(
            "self.runtime == 'process' || !has(self.env) || "
            f"!{_literal(TORCHRUN_VARIABLES)}.exists(name, name in self.env)",
            "the runtimes torchrun and deepspeed set RANK, WORLD_SIZE, MASTER_ADDR and their like for each worker",
            "env",
        ),
        Rule(
            "(has(self.allowPlain) && self.allowPlain) || !has(self.env) || "
            f"!self.env.exists(name, name.matches('{CREDENTIAL_VARIABLE}'))",
            f"a variable is named like a credential, which everyone who sees the job could read; allowed: "
            f"{CREDENTIAL_REMEDY}",
            "env",
        ),
        Rule(
            "!has(self.secrets) || !has(self.env) || !self.secrets.exists(secret, secret.name in self.env)",
            "a secret is set in spec.env as well: each variable once",
            "secrets",
        ),
    ),
    "spec.command": (
        Rule("self[0].size() > 0", "the program is empty"),
        Rule(
            r"self.size() > 1 || !self[0].matches('\\S\\s+\\S')",
            "is a whole shell line: write a list, each item one argument; there is no shell",
        ),
    ),
    "spec.code": (
        Rule(
            "!has(self.path)",
            "code.path is a folder of your own machine, which a cluster cannot read: apply what 'yard render FILE' "
            "prints, with the folder packed and stored",
            "path",
        ),
    ),
    "spec.code.git.url": (
        Rule(
            f"!self.matches(r'{PASSWORD_IN_URL}') && "
            f"(self.matches(r'{URL_OF_A_USER}') || !self.matches(r'{USER_OR_QUERY_IN_URL}'))",
            f"has credentials; allowed: {CREDENTIALS_WORDS}",
        ),
    ),
    "spec.env": (
        Rule("self.all(name, !name.startsWith('TRAINYARD_'))", _USERS_OWN),
        Rule(
            "self.all(name, name.matches('^[A-Za-z_][A-Za-z0-9_]*$'))",
            "a variable's name is letters, digits and '_', not beginning with a digit",
        ),
    ),
    "spec.secrets[].name": (Rule("!self.startsWith('TRAINYARD_')", _USERS_OWN),),
    "spec.checkpoints.pattern": (
        Rule("self.split('{step}').size() == 2", "has to contain {step} exactly once, such as step-{step}.pt"),
        Rule("!self.contains('/')", "names an entry of checkpoints.path, not a path"),
    ),
    "spec.retries.rules[]": (
        Rule(
            "has(self.exitCodes) || has(self.signals) || has(self.logPattern) || has(self.reasons)",
            "has to have at least one of exitCodes, signals, logPattern, reasons",
        ),
    ),
    "spec.kubernetes.volumes[].mountPath": (
        Rule(
            f"self != '/' && !{_literal(RESERVED_MOUNTS)}.exists(taken, self == taken || self.startsWith(taken + '/'))",
            f"has to be another path: / hides the image, and the yard itself mounts {', '.join(RESERVED_MOUNTS)}",
        ),
    ),
    "spec.kubernetes.tolerations[]": (
        Rule("has(self.key) || self.operator == 'Exists'", "has to have a key, or operator: Exists for every taint"),
        Rule(
            "!has(self.value) || self.operator == 'Equal'", "a taint that only has to exist has no value here", "value"
        ),
        Rule(
            "!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute')",
            "only evictions wait: with effect: NoExecute",
            "tolerationSeconds",
        ),
    ),
}
"""Rules of single fields."""

MAP_KEYS: Final[dict[str, str]] = {
    "spec.secrets": "name",
    "spec.inputs": "path",
    "spec.outputs": "artifact",
    "spec.kubernetes.volumes": "name",
}
"""Lists whose items differ in a field; server-side apply merges them by it."""
