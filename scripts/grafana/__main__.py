"""`python -m scripts.grafana`: renders the dashboards into the chart; `--check` fails when what is there differs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from scripts.grafana import cluster, job, queues, services
from scripts.grafana.parts import render

PAGES = (cluster.PAGE, queues.PAGE, job.PAGE, services.PAGE)
FOLDER = Path(__file__).parents[2] / "charts" / "trainyard" / "dashboards"


def rendered() -> Mapping[str, str]:
    """The text of every dashboard by the name of its file."""
    return {f"{page.name}.json": render(page) for page in PAGES}


def differing(folder: Path) -> list[str]:
    """Files that are not what is rendered: changed, lacking, or too many."""
    there = {path.name: path.read_text() for path in folder.glob("*.json")}
    wanted = rendered()
    return sorted(name for name in there.keys() | wanted.keys() if there.get(name) != wanted.get(name))


def write(folder: Path) -> None:
    """Makes the files of a folder what is rendered."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in differing(folder):
        (folder / name).unlink(missing_ok=True)
    for name, text in rendered().items():
        (folder / name).write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.grafana", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 when something differs")
    if not parser.parse_args().check:
        write(FOLDER)
        return 0
    different = differing(FOLDER)
    if different:
        names = ", ".join(different)
        print(f"{FOLDER}: {names}: not what scripts/grafana renders. Run it, commit the result", file=sys.stderr)
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
