"""A yard's home holds tokens and keys: what others may do there is taken from them."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

from trainyard import errors
from trainyard.home import TOKEN_FILE

logger = logging.getLogger(__name__)

SECRET_FILES = (TOKEN_FILE, "attempt.key", "contexts.json")
_OTHERS = 0o077


def make_private(folder: Path) -> None:
    """Makes a yard's home, and the files in it that hold secrets, their owner's alone; says what it changed.

    Raises:
        InvalidArgument: the folder belongs to somebody else, or holds other things than a yard, which others may use.
    """
    loose = _loose(folder)
    if loose and not (folder / TOKEN_FILE).exists() and any(folder.iterdir()):
        raise errors.InvalidArgument(
            f"{folder} may be used by others (mode {loose:o}) and holds other things than a yard, which would keep its "
            "token there",
            reason="InvalidHome",
            hint=f"set TRAINYARD_HOME to a folder of its own, or take the permissions of others: chmod go= {folder}",
        )
    for path in (folder, *(folder / name for name in SECRET_FILES)):
        if path.exists() and (mode := _loose(path)):
            path.chmod(mode & ~_OTHERS)
            logger.warning("%s was open to others (mode %o): it is yours alone now", path, mode)


def _loose(path: Path) -> int:
    """The mode of what others may use, else 0.

    Raises:
        InvalidArgument: it belongs to somebody else.
    """
    status = path.stat()
    if status.st_uid != os.geteuid():
        raise errors.InvalidArgument(
            f"{path} belongs to another user (uid {status.st_uid}), who could read what the yard keeps there",
            reason="InvalidHome",
            hint="set TRAINYARD_HOME to a folder of your own",
        )
    mode = stat.S_IMODE(status.st_mode)
    return mode if mode & _OTHERS else 0
