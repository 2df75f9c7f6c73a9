"""`python -m trainyard.agent.salvage NODE_FOLDER`: delivers what an agent that died had not delivered yet.

Workers write their points and their output into files, and the agent numbers the lines in its spool, so all of it
outlives the agent. The launcher runs this once nothing of the node is left and before it reports the end, while the
attempt may still write to its run. Output is read on where the spool says that the agent came to, by the agent's own
rules; doing all this again would add nothing.
"""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from pathlib import Path
from typing import Any

from trainyard_protos.v1 import metrics_pb2

from trainyard.agent import run_record
from trainyard.agent.facts import add_facts
from trainyard.agent.journal import Journal
from trainyard.agent.link import Link
from trainyard.agent.output import Output
from trainyard.agent.plan import Plan, read_plan
from trainyard.agent.shipper import Shipper
from trainyard.agent.sources import LineSource
from trainyard.agent.spool import Spool
from trainyard.agent.tracked import Tracked

LIMIT_S = 30.0


async def salvage(folder: Path, plan: Plan) -> bool:
    """Delivers the facts, points and lines of a node's folder; False when metrics would not take them.

    Raises:
        OSError: the folder cannot be read.
    """
    journal = await read_on(folder, plan)
    lines = LineSource(f"{plan.attempt_id}/{plan.node}/lines", journal.spool)
    run = run_record.kept(folder, plan)
    shipper = Shipper(Link.of(plan, folder), run, lambda: [lines, *tracked.sources], print)
    tracked = Tracked(folder / "tracker", facts=lambda facts: shipper.update(partial(_add_new, facts)))
    shipping = asyncio.create_task(shipper.run())
    while tracked.look():  # noqa: ASYNC110 (waits for nothing: lets the shipper have its turn)
        await asyncio.sleep(0)
    await shipper.finish(shipping)
    journal.spool.close()
    unstored = [shipper.refused] if shipper.refused else list(shipper.missing.values())
    if journal.lost:
        unstored.append(f"{journal.lost:,} lines of output: the disk of this machine is full")
    for what in unstored:
        print(f"not salvaged: {what}")  # noqa: T201 (goes to the agent's log)
    return not unstored


async def read_on(folder: Path, plan: Plan) -> Journal:
    """The dead agent's lines, and with them what the workers printed to their end."""
    journal = Journal(Spool.reopen(folder / "spool"), plan.node)
    files = {int(path.stem.removeprefix("rank-")): path for path in (folder / "out").glob("rank-*.log")}
    await Output(files, journal.output, places=journal.spool.marks).drain()
    return journal


def _add_new(facts: dict[str, Any], run: metrics_pb2.Run) -> None:
    """Adds facts that the dead agent may have taken in already: a note that is there is not added again."""
    if facts.get("note") in run.notes.split("\n"):
        facts = {name: fact for name, fact in facts.items() if name != "note"}
    add_facts(run, facts)


def main(argv: list[str]) -> int:
    """Delivers what metrics takes within `LIMIT_S`: this process must not outlive its purpose, whoever started it."""
    if len(argv) != 2:
        sys.stderr.write("usage: python -m trainyard.agent.salvage NODE_FOLDER\n")
        return 2
    folder = Path(argv[1]).absolute()
    try:
        return 0 if asyncio.run(asyncio.wait_for(salvage(folder, read_plan(str(folder))), LIMIT_S)) else 1
    except TimeoutError:
        sys.stderr.write(f"not everything was salvaged within {LIMIT_S:g} s\n")
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv))
