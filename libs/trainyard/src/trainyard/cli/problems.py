"""Errors in words: what is wrong, where, what is allowed, what to do next."""

from __future__ import annotations

import sys

from trainyard.cli import words
from trainyard.cli.terminal import complain, styled
from trainyard.errors import Problem, YardError


def show(error: YardError) -> None:
    """Writes an error to standard error."""
    if error.problems:
        for problem in error.problems:
            complain(describe(problem))
        complain(f"{_title()} {words.plural(len(error.problems), 'problem')} in the document; nothing was created")
    else:
        complain(f"{_title()} {error.message}")
    if error.hint and not error.problems:
        complain(f"{styled('next:', 'dim', sys.stderr)} {error.hint}")


def describe(problem: Problem) -> str:
    """A problem as `job.yaml:12: spec.resources.cpu: what is wrong; allowed: ...; did you mean ...?`."""
    place = _place(problem)
    start = ": ".join(part for part in (place, problem.field) if part)
    text = f"{styled(start, 'bold', sys.stderr)}: {problem.message}" if start else problem.message
    if problem.allowed:
        text += f"; allowed: {problem.allowed}"
    if problem.suggestion:
        text += f"; did you mean {styled(problem.suggestion, 'green', sys.stderr)}?"
    return text


def _place(problem: Problem) -> str:
    if not problem.file:  # it came through standard input
        return f"line {problem.line}" if problem.line else ""
    return f"{problem.file}:{problem.line}" if problem.line else problem.file


def _title() -> str:
    return styled("error:", "red", sys.stderr)
