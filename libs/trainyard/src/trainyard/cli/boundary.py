"""Where errors end: as text for people and an exit code for programs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from enum import IntEnum

from trainyard import errors


class ExitCode(IntEnum):
    """What `yard` exits with; stable."""

    DONE = 0
    JOB_FAILED = errors.JobFailed.exit_code
    WRONG = errors.InvalidSpec.exit_code
    NOT_FOUND = errors.NotFound.exit_code
    NOT_RUNNING = errors.NotRunning.exit_code
    REFUSED = errors.Refused.exit_code
    CONFLICT = errors.Conflict.exit_code
    JOB_CANCELLED = errors.JobCancelled.exit_code
    DEFECT = errors.Defect.exit_code
    INTERRUPTED = 130


MEANINGS: dict[ExitCode, str] = {
    ExitCode.DONE: "done; the job succeeded",
    ExitCode.JOB_FAILED: "the job failed (`run`, `logs -f`), or damage was found (`admin verify`)",
    ExitCode.WRONG: "the document, an argument or an option is wrong; nothing was created",
    ExitCode.NOT_FOUND: "not found",
    ExitCode.NOT_RUNNING: "the yard is not reachable or not running",
    ExitCode.REFUSED: "refused: authentication or permission",
    ExitCode.CONFLICT: "conflict with the present state",
    ExitCode.JOB_CANCELLED: "the job was cancelled",
    ExitCode.DEFECT: "a defect in the yard itself",
    ExitCode.INTERRUPTED: "interrupted; the job goes on (detached)",
}


def guarded(work: Callable[[], int]) -> int:
    """Runs a command; returns its exit code, or that of the error that ended it."""
    try:
        return work()
    except errors.YardError as error:
        from trainyard.cli import problems

        problems.show(error)
        return error.exit_code
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        return reader_left()
    except Exception as error:
        import traceback

        from trainyard.cli.terminal import complain

        if isinstance(error, UnicodeEncodeError) and error.encoding == "utf-8":  # an argument; contracts carry UTF-8
            complain(f"error: the text '{error.object}' is not valid UTF-8")
            return ExitCode.WRONG
        complain(traceback.format_exc().rstrip())
        complain("error: a defect in yard; please report it with the lines above")
        return ExitCode.DEFECT


def reader_left() -> int:
    """Ends well when the reader of our output left, as `head` does; nothing more can be said there."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return ExitCode.DONE
