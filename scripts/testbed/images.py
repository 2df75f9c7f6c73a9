"""The project's images, built by buildah from their Dockerfiles: no container engine, and a base made by debootstrap.

Each build is kept by the content of what goes into it, so that a test run builds what changed and nothing else. The
hash is in the name, `localhost/trainyard/NAME:HASH`: a cluster that was given one never runs another under its name.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scripts.testbed import buildah, fetch

REPOSITORY = Path(__file__).parents[2]
SUITE = "bookworm"
BASE_VERSION = 1
"""Raised to have everyone's base made anew."""
_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
_KEPT_ARCHIVES = 2
_SURELY_USED_S = 3600
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
        name: services, agent or worker (which takes seven minutes, 21 GB of disk meanwhile, and 12 GB afterwards).

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
    with buildah.alone():
        buildah.run(
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
    with buildah.alone():
        buildah.run("push", "--quiet", tag, f"docker-archive:{draft}:{tag}")
    draft.rename(path)


def remove(name: str) -> None:
    """Forgets what was built of an image: its archives, and what only it has in buildah's store."""
    with _locked(_folder() / f".{name}.lock"):
        for path in _folder().glob(f"{name}-*.tar"):
            path.unlink()
        buildah.remove(lambda repository: repository.endswith(f"/{name}"))


@contextmanager
def mounted(tag: str) -> Iterator[Path]:
    """The files of an image of buildah's store; what is changed in them is lost."""
    with buildah.container(tag) as root:
        yield root


def configuration(tag: str) -> dict[str, Any]:
    """What an image of buildah's store says about how it runs: User, Entrypoint, Env and so on."""
    with buildah.alone():
        found = json.loads(buildah.run("inspect", "--type=image", tag))
    return dict(found["OCIv1"]["config"])


def base() -> str:
    """The tag of the base, a minimal Debian, made at first use."""
    tag = f"localhost/trainyard/base:{SUITE}-{BASE_VERSION}"
    with buildah.alone():
        if tag not in buildah.run("images", "--format={{.Name}}:{{.Tag}}").split():
            root = fetch.kept(_folder() / f"base-{SUITE}-{BASE_VERSION}", _bootstrap)
            container = buildah.run("from", "scratch").strip()
            buildah.run("add", "--quiet", container, str(root / "root.tar"), "/")
            buildah.run("commit", "--quiet", "--rm", container, tag)
    return tag


def _build_archive(name: str, path: Path) -> None:
    build(f"images/{name}/Dockerfile", reference(name), REPOSITORY)
    save(reference(name), path)
    archives = sorted(_folder().glob(f"{name}-*.tar"), key=lambda each: each.stat().st_mtime)
    older, kept = archives[:-_KEPT_ARCHIVES], archives[-_KEPT_ARCHIVES:]
    # What somebody builds or tests right now is younger; of the newest build also the stages that are no part of it
    # stay, which the next build begins with.
    before = min(time.time() - _SURELY_USED_S, kept[0].stat().st_mtime)
    for each in (*older, *_folder().glob(f"{name}-*.part")):
        each.unlink()
    hashes = {each.stem.removeprefix(f"{name}-") for each in kept}
    buildah.prune(lambda repository, tag: repository.endswith(f"/{name}") and tag not in hashes, before)


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
    buildah.call([str(program.path), "--variant=minbase", "--include=ca-certificates", SUITE, str(root)], environ)
    shutil.rmtree(root / "var/cache/apt")
    shutil.rmtree(root / "var/lib/apt/lists")
    buildah.call(
        ["tar", "--create", "--one-file-system", f"--directory={root}", f"--file={folder / 'root.tar'}", "."], {}
    )
    shutil.rmtree(root)


def _folder() -> Path:
    folder = fetch.CACHE / "images"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
