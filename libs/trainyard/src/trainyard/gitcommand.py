"""Asking git about a folder that nobody vouches for.

A repository's own configuration can name programs: hooks, file system monitors, diff drivers, filters, transports.
The settings here keep git from all of them but filters and diff drivers, which are the caller's to turn off. Nothing
is asked of a person, nothing is written, and git gets a deadline. The standard library alone.
"""

from __future__ import annotations

import os
import select
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_MOST_BYTES = 8 * 1024 * 1024
_PIECE = 1 << 16
_SETTINGS = {
    "core.fsmonitor": "false",
    "core.hooksPath": os.devnull,
    "core.untrackedCache": "false",
    "safe.bareRepository": "explicit",
}
_KEPT = ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM", "GIT_CONFIG_NOSYSTEM", "GIT_CEILING_DIRECTORIES")
"""Of the caller's `GIT_*` variables; others, as a hook has them, would point to another repository."""


class GitFailed(Exception):
    """Git said no, is not there, or took too long. The text is git's own, in one line."""


@dataclass(frozen=True, slots=True)
class Git:
    """Git in one folder, until a moment of the monotonic clock.

    Args:
        folder: where it runs.
        give_up: when it is too late.
        settings: what overrides the repository's configuration, beside what always does.
    """

    folder: Path
    give_up: float
    settings: tuple[tuple[str, str], ...] = ()

    def with_settings(self, settings: Iterable[tuple[str, str]]) -> Git:
        """The same with more settings."""
        return Git(self.folder, self.give_up, (*self.settings, *settings))

    def run(self, *arguments: str) -> bytes:
        """What a command prints.

        Raises:
            GitFailed: it ended with an error, could not start, was too slow, or printed more than 8 MiB.
        """
        output = self.beginning(_MOST_BYTES, *arguments)
        if len(output) == _MOST_BYTES:
            raise GitFailed(f"git {arguments[0]} prints more than {_MOST_BYTES} bytes")
        return output

    def beginning(self, most_bytes: int, *arguments: str) -> bytes:
        """At most the first `most_bytes` of what a command prints; then git is ended.

        Raises:
            GitFailed: as `run`.
        """
        with tempfile.TemporaryFile() as complaints:
            try:
                process = subprocess.Popen(
                    ["git", "--no-pager", *arguments],
                    cwd=self.folder,
                    env=self._environment(os.environ),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=complaints,
                )
            except OSError as error:
                raise GitFailed(f"git: {error.strerror}") from error
            with process:
                try:
                    output = self._output(process, most_bytes)
                    code = 0 if len(output) == most_bytes else process.wait(self._left_s())
                except subprocess.TimeoutExpired:
                    raise GitFailed("git took too long") from None
                finally:
                    process.kill()  # nothing, when it has ended
            if code:
                raise GitFailed(_first_line(complaints) or f"git {arguments[0]} ended with {code}")
            return output

    def _output(self, process: subprocess.Popen[bytes], most_bytes: int) -> bytes:
        assert process.stdout is not None
        descriptor = process.stdout.fileno()
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        output = bytearray()
        while len(output) < most_bytes:
            if not poll.poll(self._left_s() * 1000):
                raise subprocess.TimeoutExpired("git", 0)
            piece = os.read(descriptor, min(_PIECE, most_bytes - len(output)))
            if not piece:
                break
            output += piece
        return bytes(output)

    def _left_s(self) -> float:
        return max(0.0, self.give_up - time.monotonic())

    def _environment(self, given: Mapping[str, str]) -> dict[str, str]:
        environ = {name: value for name, value in given.items() if not name.startswith("GIT_") or name in _KEPT}
        settings = [*_inherited(given), *_SETTINGS.items(), *self.settings]
        for index, (key, value) in enumerate(settings):
            environ[f"GIT_CONFIG_KEY_{index}"], environ[f"GIT_CONFIG_VALUE_{index}"] = key, value
        return environ | {
            "GIT_CONFIG_COUNT": str(len(settings)),
            "GIT_OPTIONAL_LOCKS": "0",
            "GIT_LITERAL_PATHSPECS": "1",
            "GIT_TERMINAL_PROMPT": "0",
            "GIT_NO_LAZY_FETCH": "1",
            "GIT_ALLOW_PROTOCOL": "none",  # no such transport: a partial clone fetches nothing
            "LC_ALL": "C",
        }


def _inherited(given: Mapping[str, str]) -> list[tuple[str, str]]:
    """Settings of the caller's environment, such as `safe.directory` in a container."""
    try:
        count = int(given.get("GIT_CONFIG_COUNT", "0"))
        return [(given[f"GIT_CONFIG_KEY_{index}"], given[f"GIT_CONFIG_VALUE_{index}"]) for index in range(count)]
    except (ValueError, KeyError):
        return []


def _first_line(complaints: IO[bytes]) -> str:
    complaints.seek(0)
    text = complaints.read(4096).decode(errors="replace").strip()
    return text.splitlines()[0] if text else ""
