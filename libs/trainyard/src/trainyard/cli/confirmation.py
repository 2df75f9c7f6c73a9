"""Asking before something is removed."""

from __future__ import annotations

import sys

import typer

from trainyard import errors
from trainyard.cli import terminal


def confirm(question: str, refusal: str, hint: str) -> None:
    """Asks on the terminal; an answer other than yes ends the command.

    Args:
        refusal: what this would do, for the error.

    Raises:
        Conflict: there is no terminal to prompt on.
    """
    if not (sys.stdin.isatty() and terminal.is_terminal()):
        raise errors.Conflict(
            f"this would {refusal}, and there is no terminal to prompt for confirmation",
            reason="ConfirmationNeeded",
            hint=hint,
        )
    typer.confirm(terminal.plain(question), abort=True)
