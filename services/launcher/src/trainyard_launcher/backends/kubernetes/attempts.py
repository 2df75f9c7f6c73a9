"""What the backend remembers of an attempt. All of it can be found again in the cluster."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from trainyard_protos.v1 import common_pb2

from trainyard_launcher.backend import Facts, Launch
from trainyard_launcher.backends.kubernetes.allowance import Allowance
from trainyard_launcher.backends.kubernetes.pods import Pod, Trouble


@dataclass(slots=True)
class Node:
    """One node: its pod, as long as there is one."""

    index: int
    pod: Pod | None = None
    ended: bool = False
    asked: bool = False  # its end is our wish
    opening: bool = False  # it is being told its machine
    verdict: common_pb2.Exit | None = None  # why we ended it
    joined: str = ""  # uid of the pod whose agent has the plan
    reviews: Allowance = field(default_factory=Allowance)  # of tokens that say they are its pod's
    lookups: Allowance = field(default_factory=Allowance)  # of pods that may be its own
    trouble: Trouble | None = None
    troubled_since: float = 0.0

    @property
    def lost(self) -> bool:
        """Whether it was given up because its machine is gone."""
        return self.verdict is not None and self.verdict.reason == "NodeLost"

    def note_trouble(self, trouble: Trouble | None, now: float) -> bool:
        """Keeps what keeps it from running; whether that is news."""
        known = self.trouble
        self.trouble = trouble
        if trouble is None or (known is not None and known.reason == trouble.reason):
            return False
        self.troubled_since = now
        return True


@dataclass(slots=True)
class Attempt:
    """One attempt: its Job and its nodes."""

    facts: Facts
    name: str  # of Job and Service
    uid: str = ""  # of the Job; "" before it is made
    launch: Launch | None = None  # until all agents have joined
    nodes: list[Node] = field(default_factory=list)
    secrets_usable: bool = False  # its job may have its Secrets, as found out since pods have them
    told: set[str] = field(default_factory=set)  # reasons that a remark was made of
    placed: asyncio.Event = field(default_factory=asyncio.Event)  # every node has a machine, or is over

    def __post_init__(self) -> None:
        self.nodes = self.nodes or [Node(index) for index in range(self.facts.nodes)]

    def note_placed(self) -> None:
        """Looks whether every node has a machine by now."""
        if not self.unplaced:
            self.placed.set()

    @property
    def unplaced(self) -> list[int]:
        """The nodes without a machine."""
        return [node.index for node in self.nodes if not node.ended and not (node.pod and node.pod.machine)]

    @property
    def over(self) -> bool:
        """Whether all nodes have ended."""
        return all(node.ended for node in self.nodes)
