"""The process that compacts: `python -m trainyard_metrics.storage.compactor`.

A process of its own, so that neither the event loop, nor the interpreter lock, nor the memory of the server pays for
it. A job is a line of JSON on its input, the answer a line of JSON on its output; it ends with its input.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainyard_metrics.storage import compaction
from trainyard_metrics.storage.files import Damaged
from trainyard_metrics.storage.made import Made
from trainyard_metrics.storage.manifest import column_file

_NICENESS = 10


def main() -> None:
    """Does jobs until there are no more."""
    os.nice(_NICENESS)
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line)), separators=(",", ":")), flush=True)  # noqa: T201


def _answer(job: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"made": asdict(_do(job))}
    except Damaged as damage:
        return {"damaged": [str(damage.path), damage.offset, damage.what]}
    except OSError as error:
        return {"errno": error.errno, "error": str(error)}


def _do(job: dict[str, Any]) -> Made:
    folder = Path(job["folder"])
    if "files" in job:
        return compaction.merge(folder, [column_file(file) for file in job["files"]])
    return compaction.compact(folder, job["segment"])


if __name__ == "__main__":
    main()
