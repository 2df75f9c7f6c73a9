"""Writing to people: colours on a terminal, plain text in a pipe."""

from __future__ import annotations

import os
import re
import sys
from typing import TextIO

_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "blue": "34", "cyan": "36"}
_COLOUR = r"\x1b\[[0-9;]*m"
_OTHERS = r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"
_COLOURS = re.compile(_COLOUR)
_CONTROL = re.compile(f"{_COLOUR}|{_OTHERS}")
_DEFAULT_COLUMNS = 80
"""Width of a terminal that does not know its own."""
_BYTES = re.compile("[\udc80-\udcff]")
_RESETS = ("\x1b[0m", "\x1b[m")
_STATE_STYLES = {
    "queued": "yellow",
    "starting": "cyan",
    "running": "cyan",
    "finalizing": "cyan",
    "stopping": "yellow",
    "succeeded": "green",
    "failed": "red",
    "cancelled": "yellow",
}


def is_terminal(stream: TextIO | None = None) -> bool:
    """Whether a person reads this stream (default: standard output)."""
    return (stream or sys.stdout).isatty() and os.environ.get("TERM") != "dumb"


def has_colour(stream: TextIO | None = None) -> bool:
    """Whether colours are wanted; `NO_COLOR` turns them off."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR")


def styled(text: str, style: str, stream: TextIO | None = None) -> str:
    """The text in a style ("bold", "dim" or a colour), where colours are wanted."""
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m" if has_colour(stream) else text


def state(name: str) -> str:
    """A state of a job in its colour."""
    return styled(name, _STATE_STYLES.get(name, "bold"))


def say(text: str = "") -> None:
    """Lines to standard output. Names and words of others are in them: none of it drives the reader's terminal."""
    sys.stdout.write(f"{_harmless(text)}\n")
    sys.stdout.flush()


def complain(text: str) -> None:
    """As `say`, to standard error."""
    sys.stdout.flush()
    sys.stderr.write(f"{_harmless(text)}\n")
    sys.stderr.flush()


def progress(text: str) -> None:
    """Keeps one line of standard error up to date for a person, cut to the terminal's width; "" takes it away.

    Nothing in a pipe.
    """
    if is_terminal(sys.stderr):
        # A line that wraps leaves its first row behind when it is drawn again.
        columns = os.get_terminal_size(sys.stderr.fileno()).columns or _DEFAULT_COLUMNS
        sys.stderr.write(f"\r\x1b[K{plain(text)[: columns - 1]}")
        sys.stderr.flush()


def prompt(question: str) -> None:
    """Writes a question to standard output; the answer follows on the same line."""
    sys.stdout.write(f"{plain(question)} ")
    sys.stdout.flush()


def next_steps(*commands: str) -> None:
    """The commands that are useful next, for a person: nothing in a pipe."""
    if is_terminal():
        say(styled("next: " + "  ·  ".join(commands), "dim"))


def clean(text: str) -> str:
    """One line without characters that control the reader's terminal. Colours stay, and end with the line."""
    shown = _CONTROL.sub(lambda found: found[0] if found[0].endswith("m") else "", text)
    colours = _COLOURS.findall(shown)
    return f"{shown}{_RESETS[0]}" if colours and colours[-1] not in _RESETS else shown


def plain(text: str) -> str:
    """One line without any control character, colours included: for names, and for lines that are redrawn."""
    return _CONTROL.sub("", " ".join(text.splitlines()))


def _harmless(text: str) -> str:
    # A file's name or an argument need not be UTF-8: Python has its other bytes as lone surrogates.
    text = _BYTES.sub(lambda found: f"\\x{ord(found[0]) - 0xDC00:02x}", text)
    text = text.encode(errors="backslashreplace").decode()
    return "\n".join(map(clean, text.split("\n")))
