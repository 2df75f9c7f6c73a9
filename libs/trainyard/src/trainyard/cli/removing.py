"""What `yard jobs rm` and `yard runs rm` have in common: show what would be freed, ask, remove."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from trainyard import errors
from trainyard.cli import words
from trainyard.cli.boundary import ExitCode
from trainyard.cli.output import Format, write
from trainyard.cli.terminal import complain, say
from trainyard.client.answers import Removal


async def remove(
    references: Sequence[str],
    plan: Callable[[str], Awaitable[Removal]],
    apply: Callable[[str], Awaitable[Removal]],
    *,
    command: str,
    yes: bool,
    dry_run: bool,
    output: Format,
) -> int:
    """Removes everything that is named, each all or nothing; returns the exit code.

    Args:
        plan: says what a removal frees.
        apply: does it, by id.

    Raises:
        YardError: something that is named cannot be removed; nothing was removed.
    """
    planned = {removal.id: removal for removal in [await plan(reference) for reference in references]}
    removals = list(planned.values())
    if not output.for_programs:
        for removal in removals:
            _show(removal)
    if dry_run:
        if output.for_programs:
            write(removals, output)
        return ExitCode.DONE
    if not yes:
        _ask(removals, command)
    code, done = ExitCode.DONE, []
    for removal in removals:
        try:
            done.append(await apply(removal.id))
        except errors.NotFound:  # removed meanwhile
            done.append(removal)
        except errors.YardError as error:
            complain(f"{removal.kind} {removal.name} is not removed: {error}")
            code = code or ExitCode(error.exit_code)
            continue
        if not output.for_programs:
            say(f"{removal.kind} {removal.name} is removed")
    if output.for_programs:
        write(done, output)
    return code


def _ask(removals: Sequence[Removal], command: str) -> None:
    from trainyard.cli.confirmation import confirm

    names = ", ".join(removal.name for removal in removals[:5]) + (", ..." if len(removals) > 5 else "")
    what = f"{words.plural(len(removals), removals[0].kind)} ({names}), {_total(removals)}"
    confirm(f"Remove {what}?", f"remove {what}", f"add --yes to remove, or --dry-run to see what '{command}' frees")


def _total(removals: Sequence[Removal]) -> str:
    return words.size(sum(removal.bytes for removal in removals))


def _show(removal: Removal) -> None:
    from trainyard.cli import tables

    say(f"{removal.kind} {removal.name} ({words.short(removal.id)}) frees {words.size(removal.bytes)}")
    tables.pairs([(f"  {part.what}", _part(part.bytes, part.count, part.unit)) for part in removal.frees])
    for kept in removal.keeps:
        say(f"  stays: {kept.name}: {kept.why}")
    for unread in removal.unread:
        say(f"  not counted: {unread}")


def _part(bytes: int, count: int, unit: str) -> str:
    return (
        f"{words.size(bytes)} ({count} {unit if count != 1 else unit.removesuffix('s')})" if unit else words.size(bytes)
    )
