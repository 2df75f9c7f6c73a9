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

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, home: Path, yard: YardFile) -> None:
        self._home = home
        self._yard = yard
        write_endpoint(home, yard)
        self._changes = Changes(lambda reason, text: logger.warning(text, extra={"reason": reason}))
        self._changes.watch(home, flags.DELETE | flags.MOVED_FROM | flags.MOVED_TO | flags.CLOSE_WRITE, self._look)

    def _look(self, event: Event | None) -> None:
        if (event is not None and event.name != YARD_FILE) or read_yard_file(self._home) is not None:
            return
        try:
            write_endpoint(self._home, self._yard)
        except OSError as error:
            logger.error("the yard cannot be found", extra={"file": YARD_FILE, "why": str(error)})
        else:
            logger.warning("file written again", extra={"file": YARD_FILE})

    def withdraw(self) -> None:
        """The yard serves no more."""
        self._changes.close()
        (self._home / YARD_FILE).unlink(missing_ok=True)
