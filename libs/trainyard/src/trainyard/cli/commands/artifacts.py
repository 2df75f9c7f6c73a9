"""Commands about stored trees of files: artifacts list, show, files, cat, get, put."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from trainyard.cli.arguments import Output, complete_jobs, with_client
from trainyard.cli.commands import artifact_rules
from trainyard.cli.output import Format

if TYPE_CHECKING:
    from trainyard.client import AsyncClient

Reference = Annotated[str, typer.Argument(help="name, name@alias, name@3, or the id of a version.")]
Kind = Literal["code", "checkpoint", "output", "data"]
_SHOWN_FILES = 20

group = typer.Typer(help="Code, checkpoints, outputs and data: look, store, fetch.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    for name, command in (("list", list_), ("show", show), ("files", files), ("cat", cat), ("get", get), ("put", put)):
        group.command(name)(command)
    artifact_rules.register(group)
    app.add_typer(group, name="artifacts")


def list_(
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="Versions of this artifact only.")] = "",
    job: Annotated[str, typer.Option(help="Only what this job made.", autocompletion=complete_jobs)] = "",
    kind: Annotated[Kind | None, typer.Option(help="Only code, checkpoint, output or data.")] = None,
    output: Output = Format.TABLE,
) -> None:
    """List versions, newest first."""

    async def work(client: AsyncClient) -> None:
        from trainyard.cli import artifact_views
        from trainyard.cli.output import write

        versions = [version async for version in client.versions(name, kind=kind or "", job=job)]
        if output.for_programs:
            write(versions, output)
        else:
            artifact_views.listing(versions)

    with_client(work, reads=True)


def show(reference: Reference, output: Output = Format.TABLE) -> None:
    """Show a version and its first files."""

    async def work(client: AsyncClient) -> None:
        from trainyard.cli import artifact_views
        from trainyard.cli.output import write
        from trainyard.cli.terminal import next_steps, say

        version = await client.artifact(reference)
        if output.for_programs:
            write(version, output)
            return
        artifact_views.details(version)
        found = []
        async for file in client.list_files(version.id):
            found.append(file)
            if len(found) == _SHOWN_FILES:
                break
        say()
        artifact_views.files(found)
        named = artifact_views.reference(version)
        if version.files > len(found):
            say(f"and {version.files - len(found):,} more")
        next_steps(f"yard artifacts files {named}", f"yard artifacts get {named}")

    with_client(work, reads=True)


def files(
    reference: Reference,
    prefix: Annotated[str, typer.Option(help="Only paths that begin with this.")] = "",
    output: Output = Format.TABLE,
) -> None:
    """List the files of a version."""

    async def work(client: AsyncClient) -> None:
        from trainyard.cli import artifact_views
        from trainyard.cli.output import write

        found = [file async for file in client.list_files(reference, prefix=prefix)]
        if output.for_programs:
            write(found, output)
        else:
            artifact_views.files(found)

    with_client(work, reads=True)


def cat(
    reference: Reference,
    path: Annotated[str, typer.Argument(help="Path of a file, as 'artifacts files' shows it.")],
    offset: Annotated[int, typer.Option(min=0, help="First byte.")] = 0,
    length: Annotated[int, typer.Option(min=0, help="Number of bytes; 0: to the end.")] = 0,
) -> None:
    """Write the bytes of one file, without fetching the others."""

    async def work(client: AsyncClient) -> None:
        import sys

        async for content in client.stream_file(reference, path, offset=offset, length=length):
            sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()

    with_client(work, reads=True)


def get(
    reference: Reference,
    target: Annotated[Path | None, typer.Argument(help="New or empty folder; default: the artifact's name.")] = None,
    sync: Annotated[
        bool, typer.Option("--sync", help="The folder may hold files: replace those that differ, keep others.")
    ] = False,
    output: Output = Format.TABLE,
) -> None:
    """Fetch a version's files; every byte is verified, and an interrupted fetch goes on where it was."""

    async def work(client: AsyncClient) -> None:
        from trainyard.artifacts.allocator import keep_large_blocks
        from trainyard.cli import artifact_views, words
        from trainyard.cli.output import write
        from trainyard.cli.terminal import say
        from trainyard.cli.transfer_view import progress

        keep_large_blocks()
        found = await client.artifact(reference)
        folder = target or Path(found.name)
        with progress(artifact_views.reference(found), "fetching", found.size) as done:
            version = await client.download(found.id, folder, sync=sync, progress=done)
        if output.for_programs:
            write(version, output)
        else:
            kept = f"{words.plural(version.files, 'file')}, {words.size(version.size)}"
            say(f"{artifact_views.reference(version)} is in {folder}: {kept}")

    with_client(work, reads=True)


def put(
    name: Annotated[str, typer.Argument(help="Name of the artifact.")],
    path: Annotated[Path, typer.Argument(metavar="PATH", exists=True, help="File or folder to store.")],
    alias: Annotated[list[str] | None, typer.Option(help="Alias of the new version; can be given again.")] = None,
    label: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="Can be given again.")] = None,
    metric: Annotated[
        list[str] | None, typer.Option(metavar="NAME=NUMBER", help="For keeping the best ones; can be given again.")
    ] = None,
    source: Annotated[
        list[str] | None, typer.Option("--from", help="Version it was made from; can be given again.")
    ] = None,
    output: Output = Format.TABLE,
) -> None:
    """Store a file or a folder as a new version; only what the yard lacks is sent."""

    async def work(client: AsyncClient) -> None:
        from trainyard.artifacts.allocator import keep_large_blocks
        from trainyard.cli import artifact_views, words
        from trainyard.cli.output import write
        from trainyard.cli.terminal import next_steps, say
        from trainyard.cli.transfer_view import progress

        keep_large_blocks()
        with progress(name, "storing", _size(path)) as done:
            version = await client.upload(
                path,
                name,
                aliases=alias or (),
                labels=artifact_rules.pairs("--label", label),
                metrics=artifact_rules.numbers("--metric", metric),
                inputs=source or (),
                progress=done,
            )
        if output.for_programs:
            write(version, output)
            return
        reference = artifact_views.reference(version)
        say(f"{reference}: {words.plural(version.files, 'file')}, {words.size(version.size)}")
        next_steps(f"yard artifacts show {reference}", f"yard artifacts get {reference}")

    with_client(work)


def _size(path: Path) -> int:
    if not path.is_dir():
        return path.stat().st_size
    return sum(each.lstat().st_size for each in path.rglob("*") if not each.is_symlink() and each.is_file())
