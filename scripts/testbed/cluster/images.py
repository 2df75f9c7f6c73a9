"""Images made without a registry: the one that holds a pod's namespaces, and a small system with a shell for tests."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripts.testbed import fetch

PAUSE = "trainyard.test/pause:1"
BUSYBOX = "trainyard.test/busybox:1"
_COMMANDS = (
    *("sh", "cat", "cp", "date", "dd", "echo", "env", "false", "grep", "head", "hostname", "httpd", "id", "kill", "ls"),
    *("mkdir", "mv", "nc", "nslookup", "ping", "ps", "rm", "seq", "sleep", "tail", "test", "touch", "true", "wget"),
)


def built_in() -> list[Path]:
    """The archives of the images that every node has, made when they are not there; raises fetch.Unavailable."""
    return [
        fetch.kept(fetch.CACHE / "image-pause-1", _make_pause) / "image.tar",
        fetch.kept(fetch.CACHE / "image-busybox-1", _make_busybox) / "image.tar",
    ]


def busybox() -> Path:
    """A program with a shell and the usual commands that needs no library; raises fetch.Unavailable."""
    program = fetch.debian("busybox-static", "/bin/busybox").path
    if b"ld-linux" in program.read_bytes()[:4096]:
        raise fetch.Unavailable(f"{program} needs libraries: install the package busybox-static in its place")
    return program


def write_archive(
    archive: Path, name: str, files: Mapping[str, Path | str], config: Mapping[str, Any] | None = None
) -> None:
    """An archive of Docker's form with one layer.

    Args:
        archive: to write.
        name: with the tag.
        files: what is in the image: a file to copy, or the target of a symbolic link, by path.
        config: how it is run, in Docker's words; nothing by itself without.
    """
    layer = _layer(files)
    environ = {"Env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"]}
    rootfs = {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]}
    image = {"architecture": _architecture(), "os": "linux", "config": environ | dict(config or {}), "rootfs": rootfs}
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    with tarfile.open(archive, "w") as tar:
        for path, content in (
            ("config.json", json.dumps(image).encode()),
            ("layer.tar", layer),
            ("manifest.json", json.dumps(manifest).encode()),
        ):
            _add(tar, path, content, 0o644)


def _make_pause(folder: Path) -> None:
    program = folder / "pause"
    source = Path(__file__).with_name("pause.go")
    fetch.go("build pause", "build", "-trimpath", "-ldflags", "-s -w", "-o", str(program), str(source))
    write_archive(folder / "image.tar", PAUSE, {"pause": program}, {"Entrypoint": ["/pause"]})


def _make_busybox(folder: Path) -> None:
    links: dict[str, Path | str] = {f"bin/{name}": "busybox" for name in _COMMANDS}
    write_archive(folder / "image.tar", BUSYBOX, {"bin/busybox": busybox(), **links}, {"Cmd": ["/bin/sh"]})


def _layer(files: Mapping[str, Path | str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for folder in ("bin", "etc", "tmp"):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755
            tar.addfile(entry)
        _add(tar, "etc/passwd", b"root:x:0:0::/:/bin/sh\nnobody:x:65534:65534::/:/bin/sh\n", 0o644)
        for path, content in files.items():
            if isinstance(content, Path):
                _add(tar, path, content.read_bytes(), 0o755)
            else:
                link = tarfile.TarInfo(path)
                link.type, link.linkname = tarfile.SYMTYPE, content
                tar.addfile(link)
    return buffer.getvalue()


def _add(tar: tarfile.TarFile, path: str, content: bytes, mode: int) -> None:
    entry = tarfile.TarInfo(path)
    entry.size, entry.mode = len(content), mode
    tar.addfile(entry, io.BytesIO(content))


def _architecture() -> str:
    return fetch.go("ask for the architecture", "env", "GOARCH").strip()
