"""Bytes of output into lines: redraws collapse, endless lines are split, floods are cut with a visible mark."""

from __future__ import annotations

MAX_LINE_BYTES = 64 * 1024
_LONGEST_CHARACTER = 4  # bytes of UTF-8


class LineSplitter:
    """Cuts one stream into lines. However the bytes arrive, the lines are the same.

    A carriage return starts the line anew, as on a terminal: of a progress bar only the last state before the line's
    end is a line. What is no UTF-8 is replaced.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._squeezed = 0  # returns at the end of the stream beyond the one in `_rest`

    @property
    def pending(self) -> int:
        """How many bytes at the end of what was fed are in no line yet: who feeds a new splitter from there on gets
        the lines that this one would have given.
        """
        return len(self._rest) + self._squeezed

    def feed(self, data: bytes) -> list[str]:
        """The lines that `data` completes."""
        *complete, rest = (self._rest + data).split(b"\n")
        lines = [text for line in complete for text in _texts(line.rstrip(b"\r"))]
        shown = rest.rstrip(b"\r")
        *heads, last = _cut(shown)
        # A return at the very end may be the first half of an end of line, so it is kept.
        returns = len(rest) - len(shown) + (0 if data.strip(b"\r") else self._squeezed)
        self._rest = last + (b"\r" if returns else b"")
        self._squeezed = max(returns - 1, 0)
        return lines + [head.decode(errors="replace") for head in heads]

    def end(self) -> list[str]:
        """What is left when the stream is over."""
        rest, self._rest, self._squeezed = self._rest.rstrip(b"\r"), b"", 0
        return _texts(rest) if rest else []


def _texts(line: bytes) -> list[str]:
    return [part.decode(errors="replace") for part in _cut(line)]


def _cut(line: bytes) -> list[bytes]:
    """What there is to see of a line: pieces that became too long, and last what is behind the last return."""
    pieces: list[bytes] = []
    for shown in line.split(b"\r"):
        rest = shown
        while len(rest) > MAX_LINE_BYTES:
            head, rest = _split(rest)
            pieces.append(head)
    return [*pieces, rest]


def _split(line: bytes) -> tuple[bytes, bytes]:
    """Cuts after `MAX_LINE_BYTES`, or a little before, so that no character is cut in two."""
    at = MAX_LINE_BYTES
    while at > MAX_LINE_BYTES - _LONGEST_CHARACTER and line[at] & 0xC0 == 0x80:
        at -= 1
    return line[:at], line[at:]


class Flood:
    """A limit on how much of one stream is carried to the yard; the raw file on the machine keeps everything.

    A burst of `burst` lines passes at once; beyond it `lines_per_s`. Dropped lines are counted and named by a mark.
    """

    def __init__(
        self, *, lines_per_s: float = 5_000, burst: int = 200_000, total_bytes: int = 512 * 1024 * 1024
    ) -> None:
        self._lines_per_s = lines_per_s
        self._burst = float(burst)
        self._tokens = float(burst)
        self._bytes_left = total_bytes
        self._at_s: float | None = None
        self._dropped = 0
        self._skipped_bytes = 0

    @property
    def state(self) -> tuple[int, int, int]:
        """Lines and bytes dropped since the last mark, and how many bytes may still pass."""
        return self._dropped, self._skipped_bytes, self._bytes_left

    def resume(self, dropped: int, skipped_bytes: int, bytes_left: int) -> None:
        """Goes on with the `state` of another one."""
        self._dropped, self._skipped_bytes, self._bytes_left = dropped, skipped_bytes, bytes_left

    def skip(self, size: int) -> None:
        """Counts bytes that nobody even read."""
        self._skipped_bytes += size

    def admit(self, lines: list[str], now_s: float) -> list[str]:
        """The lines to carry, with a mark where lines before them were dropped."""
        elapsed = 0.0 if self._at_s is None else now_s - self._at_s
        self._at_s = now_s
        self._tokens = min(self._burst, self._tokens + elapsed * self._lines_per_s)
        passed: list[str] = []
        for line in lines:
            if self._tokens < 1 or self._bytes_left < len(line):
                self._dropped += 1
                continue
            passed += self.mark()
            passed.append(line)
            self._tokens -= 1
            self._bytes_left -= len(line)
        return passed

    def mark(self) -> list[str]:
        """Says what was dropped since the last mark."""
        what = [f"{self._dropped:,} lines"] if self._dropped else []
        what += [f"{self._skipped_bytes >> 20:,} MiB"] if self._skipped_bytes else []
        self._dropped = self._skipped_bytes = 0
        return [f"[trainyard: {' and '.join(what)} were not carried; the raw output has them]"] if what else []
