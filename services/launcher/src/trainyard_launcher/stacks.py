"""Python stacks of every rank, asked of the agents and gathered."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

from trainyard_protos.v1 import launcher_pb2

from trainyard_launcher.attempts import Attempt, Node

Command = launcher_pb2.AgentCommand
RankStacks = launcher_pb2.RankStacks


class StacksDesk:
    """Matches requests and replies.

    Args:
        timeout_s: how long an agent may take.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._numbers = itertools.count(1)
        self._open: dict[tuple[str, int, int], asyncio.Future[Sequence[RankStacks]]] = {}

    async def take(self, attempt: Attempt) -> list[RankStacks]:
        """Stacks of all ranks, in order; ranks that cannot be asked carry an error instead."""
        gathered = await asyncio.gather(*(self._take(attempt, node) for node in attempt.nodes))
        return sorted((each for ranks in gathered for each in ranks), key=lambda each: each.rank)

    async def _take(self, attempt: Attempt, node: Node) -> Sequence[RankStacks]:
        if node.session is None:
            return _errors(attempt, node, "the agent of the node is not connected now; try again in some seconds")
        number = next(self._numbers)
        reply: asyncio.Future[Sequence[RankStacks]] = asyncio.get_running_loop().create_future()
        asked = (attempt.facts.attempt_id, node.index, number)
        self._open[asked] = reply
        try:
            node.session.send(Command(stacks=Command.TakeStacks(request_id=number)))
            return await asyncio.wait_for(reply, self._timeout_s)
        except TimeoutError:
            return _errors(attempt, node, f"the agent of the node did not answer within {self._timeout_s:.0f} s")
        finally:
            del self._open[asked]

    def answered(self, attempt: Attempt, node: Node, reply: launcher_pb2.AgentMessage.StacksReply) -> None:
        """An agent's reply; one that comes too late, or from who was not asked, is dropped."""
        waiting = self._open.get((attempt.facts.attempt_id, node.index, reply.request_id))
        if waiting is not None and not waiting.done():
            waiting.set_result(list(reply.ranks))


def _errors(attempt: Attempt, node: Node, error: str) -> list[RankStacks]:
    first = node.index * attempt.facts.workers_per_node
    return [RankStacks(rank=first + local, error=error) for local in range(attempt.facts.workers_per_node)]
