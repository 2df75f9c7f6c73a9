"""Retry rules by log pattern: matched here, line by line, in linear time whatever the pattern (RE2)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from trainyard.agent.plan import LogRule


class LogRules:
    """Watches for the patterns of a job's retry rules.

    Attributes:
        matched: the lowest index of a rule whose pattern was seen; None so far. The first rule that matches decides.
    """

    def __init__(self, rules: Sequence[LogRule]) -> None:
        self.matched: int | None = None
        self._rules: list[tuple[int, Any]] = []
        if rules:
            # Loaded only for jobs that need it: the agent has to stay small.
            import re2

            self._rules = [(rule.rule, re2.compile(rule.pattern)) for rule in sorted(rules, key=lambda each: each.rule)]

    def look(self, lines: Iterable[str]) -> None:
        """Looks at more lines."""
        for line in lines if self._rules else ():
            for index, pattern in self._rules:
                if pattern.search(line):
                    self.matched = index
                    # Only rules before this one can still change the answer.
                    self._rules = [rule for rule in self._rules if rule[0] < index]
                    break
