"""Tells when files change: one inotify instance for the whole agent, polling where the kernel has no more of them.

A user may have 128 instances on a machine by default (`fs.inotify.max_user_instances`), and every node of every job,
editors and containers share them.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from pathlib import Path

from inotify_simple import Event, INotify, flags

POLL_S = 0.5
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.ENOMEM)

Heard = Callable[[Event | None], None]
"""Takes what changed, or None when anything may have: the listener has to look for itself."""


class Changes:
    """Watches files and folders until `close`. To be used within a running event loop."""

    def __init__(self, note: Callable[[str, str], None]) -> None:
        """
        Args:
            note: takes a reason and a text, once, when something has to be polled.
        """
        self._note = note
        self._inotify: INotify | None = None
        self._listeners: dict[int, Heard] = {}
        self._polled: dict[Heard, None] = {}
        self._poll: asyncio.TimerHandle | None = None

    def watch(self, path: Path, mask: int, heard: Heard) -> int | None:
        """Calls `heard` when something in `mask` happens to `path`.

        Returns:
            The `wd` of its events; None when it is polled.

        Raises:
            OSError: there is no such path.
        """
        try:
            descriptor: int = self._instance().add_watch(path, mask)
        except OSError as error:
            if error.errno not in _EXHAUSTED:
                raise
            self._poll_for(heard, error)
            return None
        self._listeners[descriptor] = heard
        return descriptor

    def forget(self, heard: Heard) -> None:
        """Calls `heard` no more."""
        self._listeners = {descriptor: each for descriptor, each in self._listeners.items() if each != heard}
        self._polled.pop(heard, None)

    def close(self) -> None:
        """Ends everything."""
        self._listeners.clear()
        self._polled.clear()
        if self._poll is not None:
            self._poll.cancel()
        if self._inotify is not None:
            asyncio.get_running_loop().remove_reader(self._inotify.fileno())
            self._inotify.close()
            self._inotify = None

    def _instance(self) -> INotify:
        if self._inotify is None:
            self._inotify = INotify()
            asyncio.get_running_loop().add_reader(self._inotify.fileno(), self._read)
        return self._inotify

    def _read(self) -> None:
        assert self._inotify is not None
        for event in self._inotify.read(timeout=0):
            if event.mask & flags.Q_OVERFLOW:
                self._tell_all(set(self._listeners.values()))
            elif (heard := self._listeners.get(event.wd)) is not None:
                heard(event)

    def _poll_for(self, heard: Heard, error: OSError) -> None:
        self._polled[heard] = None
        if self._poll is None:
            self._note(
                "FilesPolled",
                f"the kernel watches no more files ({error.strerror}): they are looked at each {POLL_S} s; "
                "raise fs.inotify.max_user_instances and max_user_watches",
            )
            self._poll_later()

    def _poll_later(self) -> None:
        self._poll = asyncio.get_running_loop().call_later(POLL_S, self._poll_all)

    def _poll_all(self) -> None:
        self._tell_all(set(self._polled))
        self._poll_later()

    def _tell_all(self, listeners: set[Heard]) -> None:
        for heard in listeners:
            heard(None)
