"""`python -m trainyard.agent.salvage NODE_FOLDER`: delivers what an agent had not delivered when it ended.

Workers write their points and their output into files, and the agent numbers the lines in its spool, so all of it
outlives the agent. The launcher runs this once nothing of the node is left, and again until metrics has everything.
Output is read on where the spool says that the agent came to, by the agent's own rules; doing all this again would add
nothing. The launcher gives its own token for it in `TRAINYARD_DELIVERY_TOKEN`: the attempt's may have expired.

Exit codes: 0, everything is stored; 1, not everything, but another try may succeed; 3, metrics refuses the rest.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from trainyard_protos.v1 import metrics_pb2

from trainyard.agent import native, run_record
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
TOKEN_VARIABLE = "TRAINYARD_DELIVERY_TOKEN"
LOCK_FILE = "salvaging"
NOT_NOW, REFUSED = 1, 3


async def salvage(folder: Path, plan: Plan) -> bool:
    """Delivers the facts, points and lines of a node's folder; False when metrics will never take the rest.

    Raises:
        OSError: the folder cannot be read, the disk is full, or another process does the same (BlockingIOError).
    """
    with _alone(folder):
        return await _deliver(folder, plan)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """A launcher that was killed may have left one of these behind: two would number the same lines."""
    lock = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(lock)


async def _deliver(folder: Path, plan: Plan) -> bool:
    link = Link.of(plan, folder)
    link.token = os.environ.get(TOKEN_VARIABLE) or link.token
    (folder / "tracker").mkdir(exist_ok=True)  # an agent may have died before it made it
    journal = await read_on(folder, plan)
    lines = LineSource(f"{plan.attempt_id}/{plan.node}/lines", journal.spool)
    run = run_record.kept(folder, plan)
    shipper = Shipper(link, run, lambda: [lines, *(log.source for log in tracked.logs)], print)
    tracked = Tracked(folder / "tracker", facts=lambda facts: shipper.update(partial(_add_new, facts)))
    shipping = asyncio.create_task(shipper.run())
    while tracked.look():  # noqa: ASYNC110 (waits for nothing: lets the shipper have its turn)
        await asyncio.sleep(0)
    await shipper.finish(shipping)
    journal.spool.close()
    unstored = [shipper.refused] if shipper.refused else list(shipper.missing.values())
    for what in unstored:
        print(f"not salvaged: {what}")  # noqa: T201 (goes to the agent's log)
    if journal.lost:
        raise OSError(errno.ENOSPC, f"no room for {journal.lost:,} lines of output that are still to be delivered")
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
    native.die_with(os.getppid())
    folder = Path(argv[1]).absolute()
    try:
        plan = read_plan(str(folder))
    except (FileNotFoundError, ValueError, KeyError) as error:
        sys.stderr.write(f"nothing can be salvaged without the plan of the node: {error!r}\n")
        return REFUSED
    try:
        return 0 if asyncio.run(asyncio.wait_for(salvage(folder, plan), LIMIT_S)) else REFUSED
    except TimeoutError:
        sys.stderr.write(f"not everything was salvaged within {LIMIT_S:g} s\n")
    except OSError as error:
        sys.stderr.write(f"not everything was salvaged: {error}\n")
    return NOT_NOW


if __name__ == "__main__":
    sys.exit(main(sys.argv))
