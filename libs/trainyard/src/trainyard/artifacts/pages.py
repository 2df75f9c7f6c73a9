"""Memory between the thread that reads files and the loop that sends them.

The thread borrows a page, fills it with content and the chunks it was cut into, and hands it over; the loop gives it
back when its chunks are stored. There are so many pages and no more: a slow store slows reading, and memory stays.
"""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import AsyncIterator
from dataclasses import dataclass
from queue import SimpleQueue

MAX_PIECES = 4096  # of one page: bounds what small files take beside their content


class Closed(Exception):
    """Nobody takes pages any more."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A chunk, and where in the page it is."""

    hash: bytes
    start: int
    size: int


class Page:
    """Content of files, one behind the other, and the chunks cut from it so far."""

    def __init__(self, size: int) -> None:
        # Mapped memory costs nothing until it is touched, and goes back to the system at once.
        self.content = memoryview(mmap.mmap(-1, size))
        self.used = 0
        self.pieces: list[Piece] = []

    @property
    def room(self) -> memoryview:
        """Where more content goes."""
        return self.content[self.used :]

    @property
    def full(self) -> bool:
        """Whether no more content or no more chunks fit."""
        return self.used == len(self.content) or len(self.pieces) >= MAX_PIECES

    def bytes_of(self, piece: Piece) -> bytes:
        """A copy of a chunk's content."""
        return bytes(self.content[piece.start : piece.start + piece.size])

    def clear(self) -> None:
        """Forgets the content."""
        self.used = 0
        self.pieces.clear()


class Pages:
    """A bounded number of pages going round. Made inside the loop that takes filled ones.

    Args:
        count: at least 2: content that cannot be cut yet moves from one page to the next.
        size: of each, in bytes; at least twice the largest chunk.
    """

    def __init__(self, count: int, size: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._size = size
        self._unmade = count
        self._free: SimpleQueue[Page | None] = SimpleQueue()
        self._filled: asyncio.Queue[Page | None] = asyncio.Queue()  # never holds more than `count`

    def borrow(self) -> Page:
        """Of the thread: an empty page. Waits until there is one.

        Raises:
            Closed: the loop ended before.
        """
        if self._free.empty() and self._unmade:
            self._unmade -= 1
            return Page(self._size)
        page = self._free.get()
        if page is None:
            raise Closed
        return page

    def hand_over(self, page: Page | None) -> None:
        """Of the thread: a filled page; None for the end.

        Raises:
            Closed: the loop ended before.
        """
        try:
            self._loop.call_soon_threadsafe(self._filled.put_nowait, page)
        except RuntimeError:  # the loop is closed
            raise Closed from None

    async def filled(self) -> AsyncIterator[Page]:
        """Of the loop: filled pages, until the end."""
        while (page := await self._filled.get()) is not None:
            yield page

    def give_back(self, page: Page) -> None:
        """Of the loop: the page may be filled again."""
        page.clear()
        self._free.put(page)

    def close(self) -> None:
        """Of the loop: the thread that waits for a page, or will, is to stop."""
        self._free.put(None)
