"""A Python environment for the job's requirements, built once per content on this machine."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import platform
import shutil
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from trainyard.agent.checkpoints import Note
from trainyard.agent.code import tail
from trainyard.agent.failure import NodeFailed
from trainyard.agent.plan import Plan
from trainyard.agent.processes import Reaper

BUILD_TIMEOUT_S = 3600.0
READY_FILE = ".ready"


def base_of(plan: Plan) -> list[str]:
    """What an environment stands on, as options for uv: the agent's interpreter; in an image, that of the image with
    all that is installed for it.

    Raises:
        NodeFailed: EnvironmentFailed: the image has no Python.
    """
    if not plan.in_image:
        return ["--python", sys.executable]
    python = shutil.which("python3") or shutil.which("python")
    if python is None:
        raise NodeFailed("EnvironmentFailed", "python.requirements: the image has no python3 in its PATH")
    return ["--python", python, "--system-site-packages"]


async def python_bin(
    requirements: str, base: Sequence[str], root: Path, cache: Path, reaper: Reaper, log: Path, note: Note
) -> Path:
    """The `bin` folder of an environment with these requirements; built when this machine has none yet.

    Args:
        requirements: the file, relative to the code's root.
        base: of `base_of`.
        cache: environments by hash of the file's content and the interpreter.

    Raises:
        NodeFailed: EnvironmentFailed.
    """
    file = root / requirements
    try:
        content = file.read_bytes()
    except OSError as error:
        raise NodeFailed(
            "EnvironmentFailed", f"python.requirements: '{requirements}' cannot be read in the code: {error.strerror}"
        ) from error
    interpreter = f"{platform.python_implementation()} {platform.python_version()} {platform.machine()}"
    target = cache / hashlib.sha256(interpreter.encode() + b"\0" + content).hexdigest()[:32]
    await asyncio.to_thread(cache.mkdir, parents=True, exist_ok=True)
    async with _locked(target.with_suffix(".lock")):
        if not (target / READY_FILE).exists():
            note("BuildingEnvironment", f"'{requirements}' is installed, once for this content on this machine")
            await _build(file, target, base, reaper, log)
    return target / "bin"


async def _build(file: Path, target: Path, base: Sequence[str], reaper: Reaper, log: Path) -> None:
    import uv

    await asyncio.to_thread(shutil.rmtree, target, ignore_errors=True)  # a build that was cut off
    program = os.fsdecode(uv.find_uv_bin())
    python = str(target / "bin" / "python")
    for command in (
        [program, "venv", "--quiet", *base, str(target)],
        # In the folder of the file, so that what it refers to is found.
        [program, "pip", "install", "--quiet", "--python", python, "-r", str(file)],
    ):
        try:
            code = await reaper.run(command, log=log, cwd=file.parent, env=dict(os.environ), timeout_s=BUILD_TIMEOUT_S)
        except TimeoutError as error:
            raise NodeFailed(
                "EnvironmentFailed", f"'{file.name}': building took over {BUILD_TIMEOUT_S:.0f} s"
            ) from error
        if code != 0:
            raise NodeFailed("EnvironmentFailed", f"'{file.name}' cannot be installed:\n{tail(log)}")
    (target / READY_FILE).touch()


@asynccontextmanager
async def _locked(path: Path) -> AsyncIterator[None]:
    """Held by one agent of this machine at a time; the others wait for its result."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        await asyncio.to_thread(fcntl.flock, descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
