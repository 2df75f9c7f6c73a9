"""How much memory this node used at most, against its limit."""

from __future__ import annotations

from pathlib import Path

from trainyard_protos.v1 import common_pb2

from trainyard.agent.plan import Plan
from trainyard.cgroup_memory import OF_CONTAINER, read


class NodeMemory:
    """The memory of a node, as its control group counts it, or as far as samples show it.

    The group was made for this node, so all that it counts is of this node: also what was before this object, for
    workers start first.
    """

    def __init__(self, plan: Plan) -> None:
        groups = tuple(Path(file).parent for file in plan.cgroup_procs)
        self._groups = groups or (OF_CONTAINER if plan.in_image else ())
        self._requested_bytes = plan.memory_bytes

    def use(self, resident_bytes: int) -> common_pb2.MemoryUse:
        """The use so far.

        Args:
            resident_bytes: the most resident memory that was seen, for a node whose memory the kernel does not count.
        """
        found = read(self._groups)
        peak = found.peak_bytes if found else 0
        limit = found.limit_bytes if found else 0
        use = common_pb2.MemoryUse(
            peak_bytes=peak or resident_bytes,
            limit_bytes=limit or self._requested_bytes,
            sampled=not peak,
            enforced=limit > 0,
        )
        if found is not None:
            use.oom_kills = found.oom_kills
        return use
