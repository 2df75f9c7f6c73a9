"""Commands about the yards that a user works with: context list, use, add, remove."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainyard.cli.arguments import Output
from trainyard.cli.output import Format

if TYPE_CHECKING:
    from trainyard.client.contexts import Contexts

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the context; local is the yard of this machine.")]


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Choose the yard that commands talk to.", no_args_is_help=True)
    group.command("list")(list_all)
    for command in (use, add, remove):
        group.command()(command)
    app.add_typer(group, name="context")


def _contexts() -> Contexts:
    from trainyard import home
    from trainyard.client.contexts import Contexts

    return Contexts(home.home())


def list_all(output: Output = Format.TABLE) -> None:
    """List the yards that are known by name; * is the one that commands talk to."""
    from trainyard.cli.output import write
    from trainyard.cli.terminal import say

    contexts = _contexts()
    found = [(name, contexts.get(name), name == contexts.current) for name in contexts.names]
    if output.for_programs:
        rows = [{"name": name, "endpoint": each.endpoint if each else "", "current": now} for name, each, now in found]
        write(rows, output)
        return
    for name, each, now in found:
        say(f"{'*' if now else ' '} {name}  {each.endpoint if each else 'the yard of this machine'}")


def use(name: Name) -> None:
    """Talk to this yard from now on."""
    from trainyard.cli.terminal import next_steps, say

    contexts = _contexts()
    contexts.use(name)
    say(f"commands talk to {name} now")
    next_steps("yard version", "yard jobs")


def add(
    name: Name,
    endpoint: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where the yard is.")],
    token_file: Annotated[
        Path, typer.Option(metavar="FILE", help="File with the bearer token; - reads standard input.", allow_dash=True)
    ],
    ca_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Root certificate (PEM); needed beyond loopback.")
    ] = None,
) -> None:
    """Keep where a yard is, with its token and certificate; the same name again replaces it."""
    from trainyard.cli.terminal import next_steps, say
    from trainyard.client.contexts import Context

    token = _read(token_file).strip()
    if not token:
        raise typer.BadParameter(f"{token_file} is empty", param_hint="--token-file")
    if ca_file is not None:
        _read(ca_file)
    _contexts().add(name, Context(endpoint, token, str(ca_file.absolute()) if ca_file else ""))
    say(f"{name} is {endpoint}")
    next_steps(f"yard context use {name}")


def remove(name: Name) -> None:
    """Forget a yard: its address and its token."""
    from trainyard.cli.terminal import say

    _contexts().remove(name)
    say(f"{name} is forgotten")


def _read(file: Path) -> str:
    import sys

    from trainyard.errors import InvalidArgument

    try:
        return sys.stdin.read() if str(file) == "-" else file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{file} cannot be read: {error}", reason="FileUnreadable") from error
