"""Objects as files of a folder. Each appears whole: it is written under another name and renamed when it is durable."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from servicekit.disk import sync_folder
from servicekit.errors import disk_failed
from servicekit.usage import free_bytes

from trainyard_artifacts.direct import Writer
from trainyard_artifacts.objects import ObjectMissing

T = TypeVar("T")

UNFINISHED = ".part"


class FolderObjects:
    """An `ObjectStore` below `root`."""

    def __init__(self, root: Path, threads: int = 4) -> None:
        self._root = root
        self._writer = Writer()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="packs")

    async def put(self, key: str, parts: Sequence[bytes]) -> None:
        await self._run(lambda: _write(self._writer, self._root / key, parts))

    async def get(self, key: str, offset: int, size: int) -> bytes:
        return await self._run(lambda: _read(self._root / key, offset, size))

    async def size(self, key: str) -> int:
        return await self._run(lambda: _size(self._root / key))

    async def delete(self, key: str) -> None:
        await self._run(lambda: (self._root / key).unlink(missing_ok=True))

    async def list(self, prefix: str) -> list[tuple[str, int]]:
        return await self._run(lambda: _list(self._root, self._root / prefix))

    async def free_bytes(self) -> int:
        return await self._run(lambda: free_bytes(self._root))

    async def close(self) -> None:
        await asyncio.to_thread(self._pool.shutdown)

    async def _run(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        except OSError as error:
            raise disk_failed(error, "the artifact store") from error


def _write(writer: Writer, path: Path, parts: Sequence[bytes]) -> None:
    _make_folder(path.parent)
    unfinished = path.with_name(path.name + UNFINISHED)
    writer.write(unfinished, parts)
    unfinished.rename(path)
    sync_folder(path.parent)


def _make_folder(folder: Path) -> None:
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    folder.mkdir(exist_ok=True, mode=0o700)
    sync_folder(folder.parent)


def _read(path: Path, offset: int, size: int) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        raise ObjectMissing(path.name) from None
    try:
        data = os.pread(descriptor, size, offset)
    finally:
        os.close(descriptor)
    if len(data) != size:
        raise ObjectMissing(f"{path.name} is shorter than {offset + size} bytes")
    return data


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        raise ObjectMissing(path.name) from None


def _list(root: Path, folder: Path) -> list[tuple[str, int]]:
    found = []
    for path in folder.rglob("*") if folder.is_dir() else ():
        try:
            status = path.lstat()
        except FileNotFoundError:  # renamed or removed meanwhile
            continue
        if not path.is_dir():
            found.append((path.relative_to(root).as_posix(), status.st_size))
    return sorted(found)
