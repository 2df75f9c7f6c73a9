"""Commands about stored trees of files: artifacts list, show, get, put."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainyard.cli.arguments import Output, complete_jobs, with_client
from trainyard.cli.output import Format

if TYPE_CHECKING:
    from trainyard_protos.v1 import artifacts_pb2 as pb

    from trainyard.client import AsyncClient

Reference = Annotated[str, typer.Argument(help="name, name@alias, name@3, or the id of a version.")]

group = typer.Typer(help="Code, checkpoints, outputs and data: list, show, get, put.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    for name, command in (("list", list_), ("show", show), ("get", get), ("put", put)):
        group.command(name)(command)
    app.add_typer(group, name="artifacts")


def list_(
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="Versions of this artifact only.")] = "",
    job: Annotated[str, typer.Option(help="Only what this job made.", autocompletion=complete_jobs)] = "",
    kind: Annotated[str, typer.Option(help="code, checkpoint, output or data.")] = "",
    output: Output = Format.TABLE,
) -> None:
    """List versions, newest first."""

    async def work(client: AsyncClient) -> None:
        from trainyard.cli.output import write

        versions = [version async for version in client.versions(name, kind=kind, job=job)]
        if output.for_programs:
            write(versions, output)
        else:
            _listing(versions)

    with_client(work)


def _listing(versions: list[pb.Version]) -> None:
    from trainyard.cli import tables, words
    from trainyard.cli.terminal import next_steps, say

    if not versions:
        say("no artifacts")
        next_steps("yard artifacts put NAME PATH", "yard run FILE")
        return
    rows = [
        [
            f"{each.name}@{each.number}",
            each.kind,
            str(each.checkpoint.step) if each.HasField("checkpoint") else "",
            words.size(each.size),
            str(each.files),
            words.between(each.created_ns, 0),
            ", ".join(each.aliases),
        ]
        for each in versions
    ]
    tables.show(["VERSION", "KIND", "STEP", "SIZE", "FILES", "AGE", "ALIASES"], rows)
    newest = f"{versions[0].name}@{versions[0].number}"
    next_steps(f"yard artifacts show {newest}", f"yard artifacts get {newest}")


def show(reference: Reference, output: Output = Format.TABLE) -> None:
    """Show a version and its files."""

    async def work(client: AsyncClient) -> None:
        from trainyard.cli import tables, words
        from trainyard.cli.output import write
        from trainyard.cli.terminal import next_steps, say

        detail = await client.artifact(reference)
        if output.for_programs:
            write(detail, output)
            return
        version = detail.version
        tables.pairs(
            [
                ("version", f"{version.name}@{version.number}"),
                ("id", version.id),
                ("kind", version.kind),
                ("digest", version.digest.hex()),
                ("made by", version.producer.job_id),
                ("step", str(version.checkpoint.step) if version.HasField("checkpoint") else ""),
                ("created", words.moment(version.created_ns)),
                ("aliases", ", ".join(version.aliases)),
            ]
        )
        say()
        rows = [
            [words.size(file.size), f"{file.path} -> {file.symlink}" if file.symlink else file.path]
            for file in detail.manifest.files
        ]
        tables.show(["SIZE", "FILE"], rows)
        next_steps(f"yard artifacts get {version.name}@{version.number}")

    with_client(work)


def get(
    reference: Reference,
    target: Annotated[Path | None, typer.Argument(help="New or empty folder; default: the artifact's name.")] = None,
) -> None:
    """Fetch a version's files; every byte is verified."""

    async def work(client: AsyncClient) -> None:
        from trainyard.cli import words
        from trainyard.cli.terminal import say

        folder = target or Path((await client.artifact(reference)).version.name)
        version = await client.download(reference, folder)
        say(
            f"{version.name}@{version.number} is in {folder}: "
            f"{words.plural(version.files, 'file')}, {words.size(version.size)}"
        )

    with_client(work)


def put(
    name: Annotated[str, typer.Argument(help="Name of the artifact.")],
    path: Annotated[Path, typer.Argument(exists=True, help="File or folder to store.")],
    alias: Annotated[list[str] | None, typer.Option(help="Alias of the new version; can be given again.")] = None,
) -> None:
    """Store a file or a folder as a new version; only what the yard lacks is sent."""

    async def work(client: AsyncClient) -> None:
        from trainyard.cli import words
        from trainyard.cli.terminal import next_steps, say

        version = await client.upload(path, name, aliases=alias or ())
        reference = f"{version.name}@{version.number}"
        say(f"{reference}: {words.plural(version.files, 'file')}, {words.size(version.size)}")
        next_steps(f"yard artifacts show {reference}", f"yard artifacts get {reference}")

    with_client(work)
