"""Where content-defined chunks end (FastCDC 2020).

Because cuts depend on content alone, an insertion moves bytes but keeps most chunks, and only new ones are sent. A cut
depends on nothing before its chunk's start, and on at most `MAX_BYTES` after it.

The sizes are a compromise: small chunks find more that is equal, large ones cost less each. Random runs of 1 MiB that
change 5 % of a file touch 7 % of it in chunks of these sizes (10 % at twice the size), and the bytes below the smallest
size, half of all, are skipped without being looked at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyfastcdc import FastCDC

MIN_BYTES = 192 * 1024
AVERAGE_BYTES = 256 * 1024  # the parameter of the algorithm; chunks of random content are 360 KiB on average
MAX_BYTES = 1024 * 1024


class Cutter:
    """Finds the ends of chunks. Not for several threads at once."""

    def __init__(self) -> None:
        self._algorithm = _algorithm()

    def sizes(self, content: memoryview, *, final: bool) -> list[int]:
        """The sizes of the chunks at the beginning of `content` that no further byte can change.

        Args:
            content: of a file, from the beginning of a chunk on.
            final: the file ends there.
        """
        found = [chunk.length for chunk in self._algorithm.cut_buf(content)]
        # The last one may end only because the content does.
        if found and not final and found[-1] < MAX_BYTES:
            found.pop()
        return found


def _algorithm() -> FastCDC:
    from pyfastcdc import FastCDC

    return FastCDC(AVERAGE_BYTES, min_size=MIN_BYTES, max_size=MAX_BYTES, normalized_chunking=1)
