"""`python -m trainyard.agent.ship FOLDER`: delivers what plain processes tracked; of a folder of such runs, all.

Started by the tracker itself, detached from it. While the run's owner or any of its writers lives and a yard is up, the
numbers arrive as they are written; what is left when they ended is delivered then, together with what earlier processes
could not deliver.
Without a yard everything stays where it is: the next yard starts a shipper for all that is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from trainyard_protos.v1 import metrics_pb2

from trainyard import files
from trainyard.agent.facts import add_facts, context
from trainyard.agent.link import Link
from trainyard.agent.owner import ended
from trainyard.agent.shipper import LOOK_S, Shipper
from trainyard.agent.tracked import Tracked
from trainyard.home import YARD_FILE, boot_id, is_alive, token
from trainyard.source import git_context
from trainyard.tracker.offline import FINISHED_FILE, RUN_FILE

LAST_TRY_S = 30.0
LOCK_FILE = "shipping"
CONTEXT_FILE = "context.json"
"""In a run's folder: where the run began, and of which code."""


async def ship(folder: Path) -> bool:
    """Delivers one run and removes its folder; False when it has to stay, or another shipper has it.

    Raises:
        OSError, ValueError, KeyError: the folder holds no run.
    """
    home = folder.parent.parent
    lock = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return False
    try:
        delivered = await _deliver(folder, home)
        if delivered:
            await asyncio.to_thread(shutil.rmtree, folder)
        return delivered
    finally:
        os.close(lock)


async def _deliver(folder: Path, home: Path) -> bool:
    description = json.loads((folder / RUN_FILE).read_bytes())
    run = await asyncio.to_thread(_run, folder, description)
    ca_file = os.environ.get("TRAINYARD_CA_FILE", "")
    link = Link(token=await _token(home, description), endpoint_file=str(home / YARD_FILE), ca_file=ca_file)
    early: list[dict[str, Any]] = []
    tracked = Tracked(folder, facts=early.append, complain=_complain)
    shipper = Shipper(link, run, lambda: tracked.sources, _complain)
    shipping = asyncio.create_task(shipper.run())
    over = asyncio.create_task(_owner_ended(description))
    while _goes_on(folder, description, over.done(), tracked):
        _look(tracked, early, shipper)
        await asyncio.wait([over] if not over.done() else [shipping], timeout=LOOK_S)
    while _look(tracked, early, shipper):
        pass
    if not link.endpoint():
        shipping.cancel()
        return False  # the next yard delivers what waits
    finishing = asyncio.ensure_future(shipper.finish(shipping))
    await asyncio.wait([finishing], timeout=LAST_TRY_S)
    shipping.cancel()
    if not finishing.done():
        return False
    finishing.result()  # what failed was not delivered: the folder stays
    return not shipper.refused and not shipper.missing


def _goes_on(folder: Path, description: dict[str, Any], over: bool, tracked: Tracked) -> bool:
    """Whether more may be written to a run: while its owner does not write to another one, and any writer lives."""
    finished = (folder / FINISHED_FILE).exists()
    done = (description["pid"], description["start_time"]) if finished else None
    alive = (is_alive(*log.writer, description["boot_id"]) for log in tracked.logs if log.writer != done)
    return not (over or finished) or any(alive)


def _complain(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _look(tracked: Tracked, facts: list[dict[str, Any]], shipper: Shipper) -> bool:
    new = tracked.look()
    if new:
        shipper.wake()
    while facts:
        fact = facts.pop(0)
        shipper.update(lambda run, fact=fact: add_facts(run, fact))  # type: ignore[misc]
    return new


async def _token(home: Path, description: dict[str, Any]) -> str:
    """The users' token; there is none before the first yard of this home was started."""
    try:
        return token(home)
    except FileNotFoundError:
        await _owner_ended(description)
        return token(home)


async def _owner_ended(description: dict[str, Any]) -> None:
    if description["boot_id"] == boot_id():
        await ended(description["pid"], description["start_time"])


def _run(folder: Path, description: dict[str, Any]) -> metrics_pb2.Run:
    return metrics_pb2.Run(
        id=description["id"],
        name=description["name"],
        created_ns=description["created_ns"],
        context=_context(folder / CONTEXT_FILE, description["context"]),
    )


def _context(file: Path, about: dict[str, Any]) -> str:
    """Returns the context of a run as JSON.

    The run's first shipper, which starts with the run, records it: the code may have changed when a later shipper
    delivers the run.
    """
    try:
        return file.read_text()
    except FileNotFoundError:
        found = json.dumps({**_code_context(about), **about})
    with contextlib.suppress(OSError):  # a full disk: a later shipper records what it finds
        files.replace(file, found.encode())
    return found


def _code_context(about: dict[str, Any]) -> dict[str, Any]:
    script = Path(about["cwd"], *about["argv"][:1])
    if not script.is_file():
        return context(git_context(Path(about["cwd"])))
    return context(git_context(script.parent), {"script": script.name, "digest": _digest(script)})


def _digest(script: Path) -> str:
    with script.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


async def ship_all(folder: Path) -> None:
    """Delivers the run in `folder`, and then those that earlier processes left behind."""
    if await ship(folder):
        await ship_left(folder.parent)


async def ship_left(runs: Path) -> None:
    """Delivers the runs in `runs` that no other shipper has."""
    for other in await asyncio.to_thread(lambda: sorted(runs.iterdir())):
        try:
            await ship(other)
        except (OSError, ValueError, KeyError) as error:
            _complain(f"{other}: {error}")


def main(argv: list[str]) -> int:
    """Runs the shipper; the result is the process's exit code."""
    if len(argv) != 2:
        _complain("usage: python -m trainyard.agent.ship FOLDER")
        return 2
    try:
        folder = Path(argv[1])
        asyncio.run(ship_all(folder) if (folder / RUN_FILE).exists() else ship_left(folder))
    except FileNotFoundError as error:
        _complain(f"nothing was shipped: {error}")
        return 1
    return 0


if __name__ == "__main__":
    os.chdir("/")  # no shipper holds on to the folder of the script that started it
    sys.exit(main(sys.argv))
