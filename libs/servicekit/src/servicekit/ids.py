"""Identifiers and time: ids sort by the time they were made, time is UTC nanoseconds."""

from __future__ import annotations

import time

import uuid_utils


def new_id() -> str:
    """A UUIDv7 in text form: 36 characters, unique, ordered by creation time."""
    return str(uuid_utils.uuid7())


def now_ns() -> int:
    """Nanoseconds since the Unix epoch, UTC."""
    return time.time_ns()
