"""`python -m trainyard.agent.salvage NODE_FOLDER`: delivers what an agent that died had not delivered yet.

Workers write their points into files and the agent its lines into the spool, so both outlive the agent. The launcher
runs this once nothing of the node is left and before it reports the end, while the attempt may still write to its run.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from trainyard_protos.v1 import metrics_pb2

from trainyard.agent.link import Link
from trainyard.agent.plan import Plan, read_plan
from trainyard.agent.shipper import Shipper
from trainyard.agent.sources import LineSource
from trainyard.agent.spool import Spool
from trainyard.agent.tracked import Tracked

LIMIT_S = 15.0


async def salvage(folder: Path, plan: Plan) -> bool:
    """Delivers the points and lines of a node's folder; False when metrics would not take them.

    Raises:
        OSError: the folder cannot be read.
    """
    tracked = Tracked(folder / "tracker")
    tracked.look()
    lines = LineSource(f"{plan.attempt_id}/{plan.node}/lines", Spool.reopen(folder / "spool"))
    run = metrics_pb2.Run(id=plan.attempt_id, workspace=plan.workspace, job_id=plan.job_id, fence=plan.fence)
    shipper = Shipper(Link.of(plan, folder), run, lambda: [lines, *tracked.sources], print)
    await shipper.finish(asyncio.create_task(shipper.run()))
    if shipper.refused:
        print(f"not salvaged: {shipper.refused}")  # noqa: T201 (goes to the agent's log)
    return not shipper.refused


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
