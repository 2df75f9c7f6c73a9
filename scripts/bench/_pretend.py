"""A yard whose backend only pretends to run: nothing is started, so what is left is the yard's own cost.

The command of a job says how its pretended run goes: `[end]` succeeds at once, `[wait]` goes on until it is stopped.
Run as a program it is the yard of one machine, like `python -m trainyard_embedded --home FOLDER --ready-fd N`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

from servicekit.auth import bearer_token
from trainyard_embedded.app import Yard
from trainyard_embedded.memory import calm_collector
from trainyard_embedded.settings import YardSettings
from trainyard_launcher.backend import (
    Claim,
    Facts,
    Found,
    Joined,
    JoinRefused,
    Launch,
    NodeEnd,
    Observer,
    Place,
    Shell,
    ShellRequest,
    StartError,
)
from trainyard_protos.v1 import common_pb2, scheduler_pb2


class PretendBackend:
    """Keeps the laws of `trainyard_launcher.backend.Backend` for one life of the launcher."""

    keeps_records = True

    def __init__(self, capacity: common_pb2.Resources) -> None:
        self._capacity = capacity
        self._waiting: set[tuple[str, int]] = set()

    def offer(self) -> scheduler_pb2.RegisterPoolRequest:
        return scheduler_pb2.RegisterPoolRequest(machines=[scheduler_pb2.Machine(name="pretend", total=self._capacity)])

    async def changed(self) -> None:
        await asyncio.Event().wait()

    def awaits_machines(self, attempt_id: str) -> bool:
        return False

    async def open(self, observer: Observer) -> Sequence[Found]:
        self._observer = observer
        return []

    async def start(self, launch: Launch) -> str:
        for plan in launch.plans:
            node = (plan.attempt_id, plan.node)
            self._waiting.add(node)
            if plan.command[0] == "end":
                # As a real node, it ends after its start was answered.
                asyncio.get_running_loop().call_soon(self._end, node, "Completed")
        return ""

    async def stop(self, attempt_id: str, node: int, *, kill: bool) -> None:
        self._end((attempt_id, node), "Stopped")

    def _end(self, node: tuple[str, int], reason: str) -> None:
        if node in self._waiting:
            self._waiting.remove(node)
            self._observer.ended(NodeEnd(*node, common_pb2.Exit(reason=reason, exit_code=0, acknowledged=True)))

    async def join(self, attempt_id: str, node: int, credential: str, claim: Claim) -> Joined:
        raise JoinRefused("nothing runs here: this backend only pretends")

    async def logs(self, attempt_id: str, node: int) -> Sequence[str]:
        return []

    def place(self, attempt_id: str, node: int) -> Place:
        return Place("pretend")

    async def shell(self, attempt_id: str, node: int, request: ShellRequest) -> Shell:
        raise StartError("nothing runs here: this backend only pretends")

    async def undelivered(self, attempt_id: str) -> Sequence[str]:
        return ()

    async def settle(self, attempt_id: str) -> None:
        pass

    async def held(self) -> Sequence[Facts]:
        return ()

    async def forget(self, attempt_ids: Sequence[str]) -> AbstractSet[str]:
        return frozenset(attempt_ids)

    async def close(self) -> None:
        pass


async def serve(home: Path, ready_fd: int) -> None:
    """A yard with room for any number of jobs, until SIGTERM."""
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    backend = PretendBackend(common_pb2.Resources(cpu=1e6, memory_bytes=1 << 60))
    yard = Yard(YardSettings(home=home), backend=backend)
    await yard.start()
    calm_collector()
    with os.fdopen(ready_fd, "w") as ready:
        ready.write(json.dumps({"endpoint": yard.endpoint, "token": bearer_token(home)}) + "\n")
    await ended.wait()
    await yard.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--ready-fd", type=int, required=True)
    arguments = parser.parse_args()
    asyncio.run(serve(arguments.home, arguments.ready_fd))


if __name__ == "__main__":
    main()
