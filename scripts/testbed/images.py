"""The project's images, built by buildah from their Dockerfiles: no container engine, and a base made by debootstrap.

Each build is kept by the content of what goes into it, so that a test run builds what changed and nothing else. The
hash is in the name, `localhost/trainyard/NAME:HASH`: a cluster that was given one never runs another under its name.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scripts.testbed import fetch

REPOSITORY = Path(__file__).parents[2]
SUITE = "bookworm"
BASE_VERSION = 1
"""Raised to have everyone's base made anew."""
_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
_LIMIT_S = 3600
_KEPT_ARCHIVES = 2
_HASH_LENGTH = 16
_SOURCES = {
    "services": ("libs/protos", "libs/servicekit", "libs/trainyard", "services"),
    "agent": ("libs/protos", "libs/trainyard"),
    "worker": ("libs/protos", "libs/trainyard", "libs/trainkit"),
}
NAMES = tuple(_SOURCES)


def reference(name: str) -> str:
    """The name under which a cluster knows the image, `repository:tag`."""
    return f"localhost/trainyard/{name}:{_content_hash(name)}"


def archive(name: str) -> Path:
    """A docker archive of the image, built when it is not there yet.

    Args:
        name: services, agent or worker (which takes a quarter of an hour and 20 GB).

    Raises:
        fetch.Unavailable: it cannot be built; the message has the end of what the build printed.
    """
    path = _folder() / f"{name}-{_content_hash(name)}.tar"
    if not path.exists():
        with _locked(_folder() / f".{name}.lock"):
            if not path.exists():
                _build_archive(name, path)
    return path


def build(dockerfile: str, tag: str, context: Path, **arguments: str) -> None:
    """Builds an image on the testbed's base and keeps it in buildah's store under `tag`.

    Args:
        dockerfile: path of the Dockerfile within `context`.
        arguments: of the build, beside BASE_IMAGE.
    """
    values = {"BASE_IMAGE": base(), **arguments}
    # The machine's own root certificates: package registries may be behind a proxy.
    volumes = [f"--volume={_BUNDLE}:{_BUNDLE}:ro"] if _BUNDLE.exists() else []
    _buildah(
        "bud",
        "--isolation=chroot",
        "--layers",
        *volumes,
        *(f"--build-arg={key}={value}" for key, value in values.items()),
        f"--file={context / dockerfile}",
        f"--tag={tag}",
        str(context),
    )


def save(tag: str, path: Path) -> None:
    """Writes an image of buildah's store as a docker archive."""
    draft = path.with_suffix(".part")
    draft.unlink(missing_ok=True)
    _buildah("push", "--quiet", tag, f"docker-archive:{draft}:{tag}")
    draft.rename(path)


@contextmanager
def mounted(tag: str) -> Iterator[Path]:
    """The files of an image of buildah's store; what is changed in them is lost."""
    container = _buildah("from", tag).strip()
    try:
        yield Path(_buildah("mount", container).strip())
    finally:
        _buildah("rm", container)


def configuration(tag: str) -> dict[str, Any]:
    """What an image of buildah's store says about how it runs: User, Entrypoint, Env and so on."""
    found = json.loads(_buildah("inspect", "--type=image", tag))
    return dict(found["OCIv1"]["config"])


def base() -> str:
    """The tag of the base, a minimal Debian, made at first use."""
    tag = f"localhost/trainyard/base:{SUITE}-{BASE_VERSION}"
    if tag.rpartition(":")[2] in _buildah("images", "--format={{.Tag}}").split():
        return tag
    with _locked(_folder() / ".base.lock"):
        root = fetch.kept(_folder() / f"base-{SUITE}-{BASE_VERSION}", _bootstrap)
        container = _buildah("from", "scratch").strip()
        _buildah("add", "--quiet", container, str(root / "root.tar"), "/")
        _buildah("commit", "--quiet", "--rm", container, tag)
    return tag


def _build_archive(name: str, path: Path) -> None:
    build(f"images/{name}/Dockerfile", reference(name), REPOSITORY)
    save(reference(name), path)
    older = sorted(_folder().glob(f"{name}-*.tar"), key=lambda each: each.stat().st_mtime)
    for each in older[:-_KEPT_ARCHIVES]:
        each.unlink()


@functools.cache
def _content_hash(name: str) -> str:
    """Of every file that the build reads, as they are when this process first asks."""
    found = [REPOSITORY / "pyproject.toml", REPOSITORY / "uv.lock", *REPOSITORY.glob("*/*/pyproject.toml")]
    found += [path for path in (REPOSITORY / "images" / name).rglob("*") if path.is_file()]
    for source in _SOURCES[name]:
        found += [path for path in (REPOSITORY / source).rglob("*") if _is_source(path)]
    content = hashlib.sha256(f"{SUITE}-{BASE_VERSION}".encode())
    for path in sorted(set(found)):
        content.update(f"{path.relative_to(REPOSITORY)}\0{path.stat().st_mode}\0".encode() + path.read_bytes())
    return content.hexdigest()[:_HASH_LENGTH]


def _is_source(path: Path) -> bool:
    return path.is_file() and not {"tests", "__pycache__"} & set(path.parts)


def _bootstrap(folder: Path) -> None:
    program = fetch.debian("debootstrap", "/usr/sbin/debootstrap")
    environ = {"DEBOOTSTRAP_DIR": str(program.root / "usr/share/debootstrap")} if program.root else {}
    root = folder / "root"
    _run([str(program.path), "--variant=minbase", "--include=ca-certificates", SUITE, str(root)], environ)
    shutil.rmtree(root / "var/cache/apt")
    shutil.rmtree(root / "var/lib/apt/lists")
    _run(["tar", "--create", "--one-file-system", f"--directory={root}", f"--file={folder / 'root.tar'}", "."], {})
    shutil.rmtree(root)


def _buildah(*arguments: str) -> str:
    program = fetch.debian("buildah", "/usr/bin/buildah")
    store = _folder() / "store"
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
    return _run([str(program.path), *options, *arguments], environ)


def _relocate(package: Path | None, folder: Path, final: Path) -> None:
    """A copy that finds its libraries in `final`: buildah starts itself again without any environment."""
    assert package is not None
    patchelf = fetch.debian("patchelf", "/usr/bin/patchelf")
    shutil.copytree(package, folder, symlinks=True, dirs_exist_ok=True)
    libraries = ":".join(str(final / "usr/lib" / each.name) for each in (folder / "usr/lib").glob("*-linux-gnu"))
    program = str(folder / "usr/bin/buildah")
    _run([str(patchelf.path), "--force-rpath", "--set-rpath", libraries, program], patchelf.environ())


def _run(command: list[str], environ: dict[str, str]) -> str:
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


def _folder() -> Path:
    folder = fetch.CACHE / "images"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
