"""Single files of a version: their list, and the chunks that a range of bytes needs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from posixpath import dirname, join, normpath

from servicekit.errors import FailedPrecondition, InvalidArgument, NotFound, OutOfRange
from servicekit.paging import page_size
from trainyard_protos.v1 import artifacts_pb2 as pb

from trainyard_artifacts.trees import Tree

DEFAULT_PAGE = 1000
MAX_PAGE = 10_000
_MAX_PAGE_BYTES = 8 * 1024 * 1024
_MAX_LINKS = 16


def page(tree: Tree, request: pb.ListFilesRequest) -> pb.ListFilesResponse:
    """One page of files, without their chunks; its token is the path of its last file."""
    size = page_size(request.page_size, default=DEFAULT_PAGE, most=MAX_PAGE)
    at = bisect_left(tree.names, request.prefix)
    if request.page_token:
        at = max(at, bisect_left(tree.names, request.page_token + "\0"))
    response = pb.ListFilesResponse()
    room = _MAX_PAGE_BYTES
    for file in tree.files[at:]:
        if not file.path.startswith(request.prefix):
            break
        room -= len(file.path) + len(file.symlink) + 32
        if len(response.files) == size or room < 0:
            response.next_page_token = response.files[-1].path
            break
        response.files.add(path=file.path, size=file.size, mode=file.mode, symlink=file.symlink)
    return response


def find(tree: Tree, path: str) -> pb.File:
    """The file of that path; a link leads to what it points to.

    Raises:
        NotFound: FileNotFound.
        FailedPrecondition: LinkLoop.
    """
    at = path
    for _ in range(_MAX_LINKS):
        file = tree.file(at)
        if file is None:
            raise NotFound(
                f"no file '{at}' in this version" + (f", which '{path}' links to" if at != path else ""),
                reason="FileNotFound",
                hint=_near(tree, at),
            )
        if not file.symlink:
            return file
        at = normpath(join(dirname(at), file.symlink))
    raise FailedPrecondition(f"'{path}' links to itself", reason="LinkLoop", hint="read a file, not a link")


def _near(tree: Tree, path: str) -> str:
    at = bisect_left(tree.names, path)
    if at < len(tree.names) and tree.names[at].startswith(f"{path}/"):
        return f"it is a folder: '{tree.names[at]}' is in it"
    return "'yard artifacts files' shows what there is"


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes `start` to `end` of a chunk."""

    hash: bytes
    start: int
    end: int


def pieces(file: pb.File, offset: int, length: int) -> list[Piece]:
    """What makes up `length` bytes (0: all) of a file from `offset`.

    Raises:
        InvalidArgument: a negative number.
        OutOfRange: the range begins behind the end of the file.
    """
    if offset < 0 or length < 0:
        raise InvalidArgument("a range has no negative numbers", reason="BadRange", hint="length 0 reads to the end")
    if offset > file.size:
        raise OutOfRange(
            f"'{file.path}' has {file.size} bytes; byte {offset} was asked for",
            reason="BadRange",
            hint="begin at the file's size or before",
        )
    end = min(offset + length, file.size) if length else file.size
    return list(_overlaps(file, offset, end))


def _overlaps(file: pb.File, begin: int, end: int) -> Iterator[Piece]:
    at = 0
    for chunk in file.chunks:
        start, stop = max(begin - at, 0), min(end - at, chunk.size)
        if start < stop:
            yield Piece(chunk.hash, start, stop)
        at += chunk.size
