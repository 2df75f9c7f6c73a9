"""The commands, as typer sees them."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from trainyard.cli.boundary import MEANINGS
from trainyard.cli.commands import admin, artifacts, context, inside, jobs, logs, metrics, runs, submit, yard

_EXIT_CODES = "\n\n".join(f"{code:>3}  {meaning}" for code, meaning in MEANINGS.items())

app = typer.Typer(
    name="yard",
    help="Trains what a job file describes, on this machine or on a cluster.",
    epilog=f"Exit codes:\n\n{_EXIT_CODES}",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for part in (submit, jobs, logs, metrics, runs, artifacts, inside, yard, context, admin):
    part.register(app)


def run(arguments: Sequence[str]) -> int:
    """Runs one command; returns its exit code. Errors of the library pass through."""
    command = typer.main.get_command(app)
    try:
        command.main(args=list(arguments), prog_name="yard")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 0
    return 0
