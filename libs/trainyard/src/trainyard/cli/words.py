"""Numbers and times in the words people use."""

from __future__ import annotations

import time
from datetime import datetime

from trainyard.sizes import size as size

SHORT_ID = 18
"""Characters of an id that are shown: of a UUIDv7, the millisecond it was made in and the count within it."""


def duration(seconds: float) -> str:
    """For instance "0.8 s", "42 s", "3 min 5 s", "2 h 10 min", "3 d 4 h"."""
    if seconds < 10:
        return f"{max(seconds, 0):.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def between(start_ns: int, end_ns: int) -> str:
    """The time from one moment to another (0: now); "" when it has not begun."""
    if not start_ns:
        return ""
    return duration(((end_ns or time.time_ns()) - start_ns) / 1e9)


def moment(time_ns: int) -> str:
    """Date and time of the user's time zone, with its name, to the second; "" for none."""
    return f"{datetime.fromtimestamp(time_ns / 1e9).astimezone():%Y-%m-%d %H:%M:%S %Z}" if time_ns else ""


def clock(time_ns: int) -> str:
    """Time of day in the user's time zone, with its name, to the millisecond."""
    local = datetime.fromtimestamp(time_ns / 1e9).astimezone()
    return f"{local:%H:%M:%S}.{local.microsecond // 1000:03d} {local:%Z}"


def number(value: float) -> str:
    """A measured value, in at most six significant digits."""
    return f"{value:.6g}"


def plural(count: int, noun: str) -> str:
    """For instance "1 job", "3 jobs"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def because(reason: str, message: str) -> str:
    """A typed reason and its words as one phrase."""
    return message if message.startswith(reason) else ": ".join(part for part in (reason, message) if part)


def short(identifier: str) -> str:
    """The part of an id that is shown; any unique prefix is accepted."""
    return identifier[:SHORT_ID]
