"""Shell lines as the lists of arguments that `spec.command` takes."""

from __future__ import annotations

import json
import re
import shlex

_SHELL_SYNTAX = re.compile(r"[|&;<>`]|\$\(")


def as_list(line: str) -> str:
    """A shell line as the list that `spec.command` takes; "" when its quotes do not match."""
    if _SHELL_SYNTAX.search(line):
        return json.dumps(["sh", "-c", line], ensure_ascii=False)
    try:
        return json.dumps(shlex.split(line), ensure_ascii=False)
    except ValueError:
        return ""
