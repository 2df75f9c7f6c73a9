"""Counts the rows that tests prove, and breaks each row's feature to show that its tests notice.

python -m scripts.dialects                        run the tests, write docs/dialects, print one line per system
python -m scripts.dialects --check                collect the tests only; fail if a row has none or a page is outdated
python -m scripts.dialects --lint                 fail if a mutation does not apply, or a row has none (fast)
python -m scripts.dialects --break                apply every mutation and print which ones the rows' tests catch
python -m scripts.dialects --break accmt AC-023   the same for systems or rows
python -m scripts.dialects --break --date DAY     one mutation of each of the ten rows that `make test` breaks on DAY
"""

from __future__ import annotations

import argparse
import os
import sys
from datetime import date
from pathlib import Path

from scripts.dialects import mutations
from scripts.dialects.mutations import SYSTEMS, Mutation


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.dialects")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="collect the tests and compare the pages")
    action.add_argument("--lint", action="store_true", help="check that every mutation applies")
    action.add_argument("--break", action="store_true", dest="breaks", help="apply mutations and run the rows' tests")
    parser.add_argument("names", nargs="*", metavar="SYSTEM|ROW", help="what to break (default: everything)")
    parser.add_argument("--date", type=date.fromisoformat, metavar="DAY", help="break the ten rows of this day")
    parser.add_argument("--data", type=Path, default=mutations.FOLDER, help="folder of mutations")
    given = parser.parse_args()
    if given.lint:
        return _lint(given.data)
    if given.breaks:
        return _break(given)
    from scripts.dialects import page

    return page.check() if given.check else page.write()


def _lint(data: Path) -> int:
    found = mutations.load(data)
    problems = mutations.problems(found)
    for system in SYSTEMS:
        problems += [f"{row} ({system}): no mutation breaks this row" for row in mutations.without(system, found)]
    print("\n".join(problems) if problems else f"{len(found)} mutations apply", file=sys.stderr if problems else None)
    return int(bool(problems))


def _break(given: argparse.Namespace) -> int:
    chosen = _chosen(given)
    if problems := mutations.problems(chosen):
        print("\n".join(problems), file=sys.stderr)
        return 1
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as in tests, and set before torch is imported
    from scripts.dialects import breaking

    # `make test` runs the same tests unbroken by itself.
    return int(not breaking.table(chosen, unbroken_first=given.date is None))


def _chosen(given: argparse.Namespace) -> list[Mutation]:
    found = mutations.load(given.data)
    if given.date:
        chosen = mutations.of_the_day(found, given.date)
        print(f"rows of {given.date}: {' '.join(each.row for each in chosen)}", flush=True)
        return chosen
    for name in given.names:
        if not any(name in (each.system, each.row) for each in found):
            sys.exit(f"{name} is no system ({', '.join(SYSTEMS)}) and no row that has a mutation")
    if not given.names or set(given.names) & set(SYSTEMS):
        for system in SYSTEMS if not given.names else given.names:
            if system in SYSTEMS and (without := mutations.without(system, found)):
                print(f"{system}: {len(without)} rows have no mutation: {' '.join(without)}\n", flush=True)
    return [each for each in found if not given.names or {each.row, each.system} & set(given.names)]


if __name__ == "__main__":
    sys.exit(main())
