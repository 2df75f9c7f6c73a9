"""Commands about what happens to versions: artifacts tag, lineage, retention, rm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from trainyard.cli.arguments import Output, complete_jobs, with_client
from trainyard.cli.output import Format

if TYPE_CHECKING:
    from trainyard.client import AsyncClient

Reference = Annotated[str, typer.Argument(help="name, name@alias, name@3, or the id of a version.")]


def register(group: typer.Typer) -> None:
    for command in (tag, lineage, retention, rm):
        group.command(command.__name__)(command)


def pairs(option: str, given: Sequence[str] | None) -> dict[str, str]:
    """NAME=VALUE options as a mapping.

    Raises:
        InvalidArgument: one has no name or no "=".
    """
    from trainyard.errors import InvalidArgument

    found = {}
    for each in given or ():
        name, equals, value = each.partition("=")
        if not name or not equals:
            raise InvalidArgument(f"{option} {each}", reason="BadOption", hint="write it as NAME=VALUE")
        found[name] = value
    return found


def numbers(option: str, given: Sequence[str] | None) -> dict[str, float]:
    """NAME=NUMBER options as a mapping.

    Raises:
        InvalidArgument: one is not of this form.
    """
    from trainyard.errors import InvalidArgument

    found = {}
    for name, value in pairs(option, given).items():
        try:
            found[name] = float(value)
        except ValueError:
            raise InvalidArgument(
                f"{option} {name}={value}: {value!r} is no number", reason="BadOption", hint="write it as NAME=NUMBER"
            ) from None
    return found


def tag(
    reference: Reference,
    alias: Annotated[str, typer.Argument(help="Name that moves to this version, for instance best.")],
    output: Output = Format.TABLE,
) -> None:
    """Give a version an alias; the version that had it loses it. Versions with an alias are kept."""

    async def work(client: AsyncClient) -> None:
        from trainyard.cli import artifact_views
        from trainyard.cli.output import write
        from trainyard.cli.terminal import say

        version = await client.set_alias(reference, alias)
        if output.for_programs:
            write(version, output)
        else:
            say(f"{version.name}@{alias} is {artifact_views.reference(version)}")

    with_client(work)


def lineage(
    reference: Annotated[str, typer.Argument(metavar="[REFERENCE]", help="A version; or give --job.")] = "",
    job: Annotated[str, typer.Option(help="What this job used and made.", autocompletion=complete_jobs)] = "",
    output: Output = Format.TABLE,
) -> None:
    """Show what a version was made from and into, and which jobs made and used it."""

    async def work(client: AsyncClient) -> None:
        from trainyard.cli import artifact_views
        from trainyard.cli.output import write
        from trainyard.errors import InvalidArgument

        if bool(reference) == bool(job):
            raise InvalidArgument("lineage of what?", reason="BadOption", hint="name a version, or a job with --job")
        found = await client.lineage(reference, job=job)
        if output.for_programs:
            write(found, output)
        elif job:
            artifact_views.job_lineage(found)
        else:
            artifact_views.lineage(found)

    with_client(work, reads=True)


def retention(
    name: Annotated[str, typer.Argument(help="Name of the artifact.")],
    keep_last: Annotated[int | None, typer.Option(min=1, help="Keep the newest ones.")] = None,
    keep_best: Annotated[int | None, typer.Option(min=1, help="Keep the best ones by --metric.")] = None,
    metric: Annotated[str, typer.Option(help="Metric of the versions that --keep-best looks at.")] = "",
    mode: Annotated[str, typer.Option(help="min or max: which values of the metric are good.")] = "",
    ttl: Annotated[str, typer.Option(metavar="DURATION", help="Keep those younger than this, for instance 30d.")] = "",
    everything: Annotated[bool, typer.Option("--all", help="Keep all versions: no rule.")] = False,
    output: Output = Format.TABLE,
) -> None:
    """Show or set which versions are kept: those that any rule keeps. Without options, only show."""

    async def work(client: AsyncClient) -> None:
        from trainyard.cli import artifact_views
        from trainyard.cli.output import write
        from trainyard.errors import InvalidArgument

        given = keep_last is not None or keep_best is not None or ttl or metric or mode
        if everything and given:
            raise InvalidArgument("--all and a rule", reason="BadOption", hint="give rules, or --all alone")
        if bool(keep_best) != bool(metric):
            raise InvalidArgument(
                "--keep-best and --metric belong together", reason="BadOption", hint="give both, or neither"
            )
        if given or everything:
            rules = await client.set_retention(
                name,
                keep_last=keep_last or 0,
                keep_best=keep_best or 0,
                best_metric=metric,
                best_mode=mode,
                ttl_s=_seconds(ttl),
            )
        else:
            rules = await client.retention(name)
        if output.for_programs:
            write(rules, output)
        else:
            artifact_views.retention(rules)

    with_client(work)


def _seconds(duration: str) -> float:
    from trainyard.errors import InvalidArgument
    from trainyard.spec.quantities import QuantityError, seconds

    if not duration:
        return 0.0
    try:
        return seconds(duration)
    except QuantityError as error:
        raise InvalidArgument(
            f"--ttl {duration}: {error}", reason="BadOption", hint="for instance 12h or 30d"
        ) from None


def rm(
    reference: Reference,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask.")] = False,
    output: Output = Format.TABLE,
) -> None:
    """Delete a version. Its content goes when nothing else has it; lineage still names it."""

    async def work(client: AsyncClient) -> None:
        from trainyard.cli import artifact_views, words
        from trainyard.cli.confirmation import confirm
        from trainyard.cli.output import write
        from trainyard.cli.terminal import say

        version = await client.artifact(reference)
        named = artifact_views.reference(version)
        if not yes:
            kept = f"{words.plural(version.files, 'file')}, {words.size(version.size)}"
            aliases = f", {', '.join(version.aliases)}" if version.aliases else ""
            confirm(
                f"Delete {named} ({kept}{aliases})?",
                f"delete {named}",
                f"'yard artifacts rm {named} --yes' deletes it",
            )
        await client.delete_version(version.id)
        if output.for_programs:
            write(version, output)
        else:
            say(f"{named} is deleted")

    with_client(work)
