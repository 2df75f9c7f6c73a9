"""Entry of the command `yard`."""

from __future__ import annotations

import sys

from trainyard.cli.boundary import guarded


def main() -> None:
    """Runs the command line and exits with its code."""
    sys.exit(guarded(_run))


def _run() -> int:
    arguments = sys.argv[1:]
    # A plain `yard run FILE` has nothing to parse, and the parser takes a third of the time a submission may take.
    if len(arguments) == 2 and arguments[0] == "run" and not arguments[1].startswith("-"):
        from trainyard.cli.run.command import run_file

        return run_file(arguments[1])
    from trainyard.cli.app import run

    return run(arguments)


if __name__ == "__main__":
    main()
