"""The folder in which a yard keeps everything, and how processes of this machine find the yard and each other.

The standard library alone: the agent and every command read this before anything else is imported.

A process is named by pid, start time and boot id together, because a pid alone is reused.
"""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from trainyard import errors, files

YARD_FILE = "yard.json"
LOCK_FILE = "yard.lock"
READER_FILE = "reader.json"
"""As `yard.json`, of the read-only yard that commands share while no yard is up: only they look for it."""
TOKEN_FILE = "token"
LAUNCHER_ID_FILE = "launcher-id"
_DATABASES = ("scheduler.db", "metrics.db", "artifacts.db")
_START_TIME_FIELD = 22  # of /proc/<pid>/stat, counted from 1 as in proc(5)
_STATE_FIELD = 3


@dataclass(frozen=True, slots=True)
class YardFile:
    """What `yard.json` says: the yard that serves this home, and the process it is."""

    endpoint: str
    pid: int
    start_time: int
    boot_id: str
    version: str
    ephemeral: bool
    ca: str = ""
    """Root certificate (PEM file) of a yard that serves TLS; earlier versions did not write it down."""

    @classmethod
    def of_this_process(cls, endpoint: str, version: str, *, ephemeral: bool, ca: Path | None = None) -> YardFile:
        """What the process that serves a yard writes."""
        pid, file = os.getpid(), str(ca.absolute()) if ca else ""
        return cls(endpoint, pid, process_start_time(pid) or 0, boot_id(), version, ephemeral, file)

    @property
    def alive(self) -> bool:
        """Whether the process that wrote the file still runs."""
        return is_alive(self.pid, self.start_time, self.boot_id)


def home() -> Path:
    """Returns the yard's folder: `TRAINYARD_HOME`, or `~/.trainyard`. It need not exist yet.

    Raises:
        InvalidArgument: this user may not read the folder.
    """
    configured = os.environ.get("TRAINYARD_HOME")
    folder = Path(configured).expanduser().absolute() if configured else Path.home() / ".trainyard"
    try:
        (folder / YARD_FILE).stat()
    except PermissionError as error:
        raise errors.InvalidArgument(
            f"the yard's home {folder} cannot be read: {error.strerror}",
            reason="InvalidHome",
            hint="set TRAINYARD_HOME to a folder of your own",
        ) from error
    except OSError:
        pass  # a yard that starts makes the folder, or reports why it cannot
    return folder


def has_data(home: Path) -> bool:
    """Whether a yard was up here before, so that there is something to read."""
    return all((home / name).exists() for name in _DATABASES)


def read_yard_file(home: Path, name: str = YARD_FILE) -> YardFile | None:
    """What `yard.json` says, be the yard alive or killed; None when none was started, or it ended on purpose."""
    try:
        fields = {"ca": ""} | json.loads((home / name).read_bytes())
        return YardFile(**{name: fields[name] for name in YardFile.__slots__})
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return None


def read_endpoint(home: Path, name: str = YARD_FILE) -> YardFile | None:
    """The yard that serves `home` now, or None when there is none (never started, stopped, or killed)."""
    found = read_yard_file(home, name)
    return found if found is not None and found.alive else None


def is_locked(home: Path) -> bool:
    """Whether a yard runs for `home`, also one that is starting, ending, or whose `yard.json` is missing."""
    try:
        descriptor = os.open(home / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def write_endpoint(home: Path, yard: YardFile, name: str = YARD_FILE) -> None:
    """Publishes the yard that serves `home`; readers see the old file or the new one, never a part."""
    files.replace(home / name, f"{json.dumps(asdict(yard))}\n".encode())


def token(home: Path) -> str:
    """The bearer token of the yard in `home`.

    Raises:
        FileNotFoundError: no yard was ever started there.
    """
    return (home / TOKEN_FILE).read_text().strip()


def boot_id() -> str:
    """An id of this boot of the machine; "" where the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def process_start_time(pid: int) -> int | None:
    """When `pid` was started, in clock ticks since boot; None when there is no such process, or only its zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The command, in parentheses, may itself hold spaces and parentheses.
    fields = stat[stat.rindex(")") + 2 :].split()
    if fields[_STATE_FIELD - 3] in "ZX":
        return None
    return int(fields[_START_TIME_FIELD - 3])


def is_alive(pid: int, start_time: int, boot_id: str) -> bool:
    """Whether the very process that had this pid, start time and boot id still runs."""
    return boot_id == _current_boot_id() and process_start_time(pid) == start_time


_current_boot_id = boot_id  # `is_alive` has a parameter of that name
