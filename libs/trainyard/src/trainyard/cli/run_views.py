"""Runs as people read them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trainyard.cli import tables, terminal, words
from trainyard.cli.terminal import next_steps, say, styled
from trainyard.client.comparison import FILES, Comparison, change_between, flattened
from trainyard.client.names import SYSTEM_PREFIX

if TYPE_CHECKING:
    from trainyard.client.records import Run

_CELL = 40
"""Characters of a value in a table."""
_CHANGE_LINES = 40
"""Lines of a change of code below a comparison."""


def listing(runs: Sequence[Run], names: Sequence[str]) -> None:
    """A table of runs, with the last values of some series."""
    if not runs:
        say("no runs")
        next_steps("yard run FILE", "yard runs list --all-attempts")
        return
    rows = [
        [
            words.short(run.id),
            run.name,
            words.short(run.job_id),
            str(run.attempt or ""),
            words.between(run.created_ns, 0),
            words.between(run.updated_ns, 0),
            *(words.number(run.values[name]) if name in run.values else "-" for name in names),
        ]
        for run in runs
    ]
    tables.show(["ID", "NAME", "JOB", "ATTEMPT", "AGE", "LAST POINT", *names], rows)
    newest = words.short(runs[0].id)
    other = f"yard compare {newest} {words.short(runs[1].id)}" if len(runs) > 1 else f"yard metrics {newest}"
    next_steps(f"yard runs show {newest}", other)


def detail(run: Run, *, wide: bool) -> None:
    """One run. Wide: also what the agent samples, and the diff of its code."""
    tables.pairs(
        [
            ("run", run.id),
            ("name", run.name),
            ("job", f"{run.job_id}, attempt {run.attempt}" if run.job_id else ""),
            ("created", words.moment(run.created_ns)),
            ("last point", words.moment(run.updated_ns)),
            ("notes", run.notes),
        ]
    )
    git = {name: value for name, value in run.git.items() if wide or name != "diff"}
    place = {name: value for name, value in run.context.items() if name not in ("git", "packages")}
    if packages := run.context.get("packages"):
        place["packages"] = packages if wide else f"{len(packages)}, which -o wide lists"
    values = {name: value for name, value in run.values.items() if wide or not name.startswith(SYSTEM_PREFIX)}
    for title, facts in (
        ("tags", run.tags),
        ("params", run.params),
        ("spec", run.spec),
        ("git", git),
        ("context", place),
    ):
        _section(title, [(name, _text(value)) for name, value in flattened(facts) if name])
    _section(
        "last values", [(name, f"{words.number(value)} (step {run.steps[name]})") for name, value in values.items()]
    )
    next_steps(f"yard metrics {words.short(run.id)}", f"yard compare {words.short(run.id)} OTHER")


def _section(title: str, items: Sequence[tuple[str, str]]) -> None:
    if items:
        say()
        say(styled(title, "bold"))
        tables.pairs([(f"  {name}", value) for name, value in items])


def comparison(found: Comparison, *, wide: bool) -> None:
    """A table with a column for each run, and how their code differs."""
    headers = ["", *(f"{run.name} ({words.short(run.id)})" for run in found.runs)]
    rows = [
        [f"{row.part}.{row.name}" if row.name else row.part, *(_cell(value, wide) for value in row.values)]
        for row in found.rows
    ]
    if not rows:
        say("nothing differs")
    else:
        tables.show(headers, rows)
    _warn_of_unknown_code(found)
    first, second = found.diffs[:2]
    if len(found.runs) == 2 and (change := change_between(first, second)):
        lines = change.splitlines()
        say()
        say(styled("uncommitted code, first to second", "bold"))
        _show_change(lines[:_CHANGE_LINES])
        if len(lines) > _CHANGE_LINES:
            both = " ".join(words.short(run.id) for run in found.runs)
            next_steps(f"yard compare {both} --diff shows the other {len(lines) - _CHANGE_LINES} lines")


def code_change(found: Comparison) -> None:
    """How the uncommitted code of the second run differs from the first's, whole."""
    lines = change_between(*found.diffs[:2]).splitlines()
    _show_change(lines)
    if lines:
        return
    files = [row for row in found.rows if row.part == "code" and row.name.startswith(FILES) and row.differs]
    for row in files:
        first, second = row.values[:2]
        change = "added" if first is None else "removed" if second is None else "changed"
        say(f"{change}  {row.name.removeprefix(FILES)}")
    if not files and any(row.part == "code" and row.differs for row in found.rows):
        terminal.complain("the code differs; the files of both are not recorded, or a version of it was deleted")
    elif not files and not _warn_of_unknown_code(found):
        terminal.complain("the uncommitted code of both is the same")


def _warn_of_unknown_code(found: Comparison) -> bool:
    """Reports code that may differ although no recorded code does; returns whether there is any."""
    if found.code_differs:
        return False
    for run, what in zip(found.runs, found.unknown, strict=True):
        if what:
            terminal.complain(
                f"not compared: {what}, of {run.name} ({words.short(run.id)}), because no run records that"
            )
    return any(found.unknown)


def _show_change(lines: Sequence[str]) -> None:
    colours = {"+": "green", "-": "red", "@": "cyan"}
    for line in lines:
        clean = terminal.clean(line) if terminal.is_terminal() else line
        say(styled(clean, colours[line[0]]) if line[:1] in colours else clean)


def _cell(value: Any, wide: bool) -> str:
    text = "-" if value is None else " ".join(_text(value).split())
    return text if wide or len(text) <= _CELL else f"{text[: _CELL - 1]}…"


def _text(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, float):
        return words.number(value)
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return terminal.clean(text) if terminal.is_terminal() else text
