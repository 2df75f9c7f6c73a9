"""buildah, on a store of the testbed's own. Two builds at once lose each other's layers: a process has it alone."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scripts.testbed import fetch
from scripts.testbed.runs.run import cleaned_up_if_killed

logger = logging.getLogger(__name__)

_LIMIT_S = 3600
_MOUNTED = "mounted"
_REMOVE_LEFT = (sys.executable, "-c", "from scripts.testbed import buildah; buildah.remove_left()")


@contextmanager
def alone() -> Iterator[None]:
    """Held around commands on the store; it does not nest."""
    with cleaned_up_if_killed(*_REMOVE_LEFT), (_folder() / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def run(*arguments: str) -> str:
    """Runs a command of buildah, under `alone`; returns what it printed. Raises as `call`."""
    program = fetch.debian("buildah", "/usr/bin/buildah")
    store = _folder()
    environ = {"TMPDIR": str(store / "tmp")}  # cache mounts of builds are kept there
    options = [f"--root={store / 'root'}", f"--runroot={store / 'run'}", "--storage-driver=overlay"]
    (store / "tmp").mkdir(parents=True, exist_ok=True)
    if program.root is not None:
        root = fetch.CACHE / "buildah-relocated"
        fetch.kept(root, lambda folder: _relocate(program.root, folder, root))
        program = fetch.Program(root / "usr/bin/buildah")
        environ["CONTAINERS_REGISTRIES_CONF"] = str(root / "etc/containers/registries.conf")
        environ["CONTAINERS_CONF"] = str(root / "usr/share/containers/containers.conf")
        if arguments[0] in ("bud", "from", "commit", "push"):
            arguments = (arguments[0], f"--signature-policy={root / 'etc/containers/policy.json'}", *arguments[1:])
    return call([str(program.path), *options, *arguments], environ)


def call(command: list[str], environ: dict[str, str]) -> str:
    """Runs a program; returns what it printed.

    Raises:
        fetch.Unavailable: it cannot be run, or fails; the message has the end of what it printed.
    """
    values = os.environ | environ
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            stdin=subprocess.DEVNULL,
            env=values,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise fetch.Unavailable(f"cannot run {command[0]}: {error}") from error
    if done.returncode:
        output = (done.stdout + done.stderr)[-4000:]
        raise fetch.Unavailable(f"{' '.join(command)} ended with {done.returncode}:\n{output}")
    return done.stdout


@contextmanager
def container(image: str) -> Iterator[Path]:
    """The files of a container that is made of an image; it is gone afterwards. Others may build meanwhile."""
    name = f"{_MOUNTED}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    with cleaned_up_if_killed(*_REMOVE_LEFT):
        with alone():
            run("from", f"--name={name}", image)
        try:
            with alone():
                root = Path(run("mount", name).strip())
            yield root
        finally:
            with alone():
                run("rm", name)


def remove_left() -> None:
    """Removes the containers that killed builds and tests have left, with their mounts."""
    with alone():
        for each in _listed("containers"):
            if _is_left(each["containername"]):
                _remove("rm", each["id"])


def prune(gone: Callable[[str, str], bool], before: float) -> None:
    """Removes images, layers that no image is made of, and the containers that killed builds and tests left.

    Args:
        gone: says of a repository and a tag whether the image may go.
        before: Unix time; what is younger stays, and what that is made of.
    """
    remove_left()
    with alone():
        for each in _listed("images"):  # those in use as layers of others are not listed
            names = each["names"] or []
            split = [name.rpartition(":") for name in names]
            if each["created"] < before and all(gone(repository, tag) for repository, _, tag in split):
                _remove("rmi", *(names or [each["id"]]))


def remove(wanted: Callable[[str], bool]) -> None:
    """Removes the images whose repository is wanted, and the layers that only they have."""
    with alone():
        for each in _listed("images"):
            names = [name for name in each["names"] or [] if wanted(name.rpartition(":")[0])]
            if names:
                _remove("rmi", *names)


def _listed(kind: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(run(kind, "--json")) or []
    return found


def _is_left(name: str) -> bool:
    """Whether nobody has a container any more: builds have theirs only while they run, `alone`."""
    marked, _, rest = name.partition("-")
    return marked != _MOUNTED or not Path(f"/proc/{rest.partition('-')[0]}").exists()


def _remove(command: str, *what: str) -> None:
    try:
        run(command, *what)
    except fetch.Unavailable as error:  # a container of a running test has it, for instance
        logger.warning("it stays in the store of images: %s", error)


def _relocate(package: Path | None, folder: Path, final: Path) -> None:
    """A copy that finds its libraries in `final`: buildah starts itself again without any environment."""
    assert package is not None
    patchelf = fetch.debian("patchelf", "/usr/bin/patchelf")
    shutil.copytree(package, folder, symlinks=True, dirs_exist_ok=True)
    libraries = ":".join(str(final / "usr/lib" / each.name) for each in (folder / "usr/lib").glob("*-linux-gnu"))
    program = str(folder / "usr/bin/buildah")
    call([str(patchelf.path), "--force-rpath", "--set-rpath", libraries, program], patchelf.environ())


def _folder() -> Path:
    folder = fetch.CACHE / "images" / "store"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
