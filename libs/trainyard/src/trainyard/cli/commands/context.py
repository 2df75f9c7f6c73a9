"""Commands about the yards that a user works with: context list, use, add, remove."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainyard.cli.arguments import Output
from trainyard.cli.output import Format

if TYPE_CHECKING:
    from trainyard.client.contexts import Context, Contexts, Release

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
        write([{"name": name, **_place(each), "current": now} for name, each, now in found], output)
        return
    for name, each, now in found:
        say(f"{'*' if now else ' '} {name}  {_words(each)}")


def _place(context: Context | Release | None) -> dict[str, str]:
    """Where a yard is, for programs; never its token."""
    from trainyard.client.contexts import Release

    if isinstance(context, Release):
        return {
            "endpoint": "",
            "release": context.release,
            "namespace": context.namespace,
            "kube_context": context.kube_context,
            "kubeconfig": context.kubeconfig,
        }
    return {"endpoint": context.endpoint if context else ""}


def _words(context: Context | Release | None) -> str:
    from trainyard.client.contexts import Context

    if context is None:
        return "the yard of this machine"
    return context.endpoint if isinstance(context, Context) else str(context)


def use(name: Name) -> None:
    """Talk to this yard from now on."""
    from trainyard.cli.terminal import next_steps, say

    contexts = _contexts()
    contexts.use(name)
    say(f"commands talk to {name} now")
    next_steps("yard version", "yard jobs")


def add(
    name: Name,
    endpoint: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where the yard is.")] = "",
    token_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File with the bearer token; - reads standard input.", allow_dash=True),
    ] = None,
    ca_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Root certificate (PEM); needed beyond loopback.")
    ] = None,
    release: Annotated[
        str, typer.Option(metavar="NAME", help="Release of the chart, reached through its cluster.")
    ] = "",
    namespace: Annotated[str, typer.Option("-n", "--namespace", help="Where the release is installed.")] = "",
    kube_context: Annotated[
        str, typer.Option(metavar="NAME", help="Context of the kubeconfig; default: the current one at each use.")
    ] = "",
    kubeconfig: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Its file; default: as kubectl finds it.")
    ] = None,
) -> None:
    """Keep where a yard is: its address with token and certificate, or the release of a chart.

    A release is reached through its cluster's API server; its token is read there, unless it is given. The same name
    again replaces a context.
    """
    from trainyard.cli.terminal import next_steps, say
    from trainyard.client.contexts import Context, Release

    if bool(endpoint) == bool(release):
        raise typer.BadParameter("give one of --endpoint and --release", param_hint="--endpoint")
    token = _token(token_file) if token_file is not None else ""
    found: Context | Release
    if release:
        if ca_file is not None:
            raise typer.BadParameter("the release has its own certificate", param_hint="--ca-file")
        file = str(kubeconfig.absolute()) if kubeconfig is not None else ""
        found = Release(release, namespace or "default", kube_context, file, token)
    else:
        if not token:
            raise typer.BadParameter("an address needs a token", param_hint="--token-file")
        _refuse_cluster_options(namespace, kube_context, kubeconfig)
        found = Context(endpoint, token, _certificate(ca_file))
    _contexts().add(name, found)
    say(f"{name} is {_words(found)}")
    next_steps(f"yard context use {name}")


def _refuse_cluster_options(namespace: str, kube_context: str, kubeconfig: Path | None) -> None:
    given = {"--namespace": namespace, "--kube-context": kube_context, "--kubeconfig": kubeconfig}
    for option, value in given.items():
        if value:
            raise typer.BadParameter("goes with --release, not with --endpoint", param_hint=option)


def _token(file: Path) -> str:
    token = _read(file).strip()
    if not token:
        raise typer.BadParameter(f"{file} is empty", param_hint="--token-file")
    return token


def _certificate(file: Path | None) -> str:
    if file is None:
        return ""
    _read(file)
    return str(file.absolute())


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
