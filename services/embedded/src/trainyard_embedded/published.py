"""`yard.json` for as long as a yard serves. Without it nobody finds the yard, its agents and `yard down` included."""

from __future__ import annotations

import logging
from pathlib import Path

from inotify_simple import Event, flags
from trainyard.agent.changes import Changes
from trainyard.home import YARD_FILE, YardFile, read_yard_file, write_endpoint

logger = logging.getLogger(__name__)


class Published:
    """Says where a yard is, and says it again when the file is removed or damaged. Make it within a running loop.

    Args:
        name: of the file.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, home: Path, yard: YardFile, name: str = YARD_FILE) -> None:
        self._name = name
        self._home = home
        self._yard = yard
        write_endpoint(home, yard, name)
        self._changes = Changes(lambda reason, text: logger.warning(text, extra={"reason": reason}))
        self._changes.watch(home, flags.DELETE | flags.MOVED_FROM | flags.MOVED_TO | flags.CLOSE_WRITE, self._look)

    def _look(self, event: Event | None) -> None:
        if (event is not None and event.name != self._name) or read_yard_file(self._home, self._name) is not None:
            return
        try:
            write_endpoint(self._home, self._yard, self._name)
        except OSError as error:
            logger.error("the yard cannot be found", extra={"file": self._name, "why": str(error)})
        else:
            logger.warning("file written again", extra={"file": self._name})

    def withdraw(self) -> None:
        """The yard serves no more."""
        self._changes.close()
        (self._home / self._name).unlink(missing_ok=True)
