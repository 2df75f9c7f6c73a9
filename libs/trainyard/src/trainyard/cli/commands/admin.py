"""Commands for whoever runs a yard: admin usage, verify, maintain, backup."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainyard.cli.arguments import Output, with_client
from trainyard.cli.boundary import ExitCode
from trainyard.cli.output import Format

if TYPE_CHECKING:
    from trainyard.client import AsyncClient, ServiceUsage, Verified

group = typer.Typer(help="For whoever runs the yard: usage, verify, maintain, backup.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    for command in (usage, verify, maintain, backup):
        group.command()(command)
    app.add_typer(group, name="admin")


def usage(output: Output = Format.TABLE) -> None:
    """Show how much each service stores, and how much room is left."""

    async def work(client: AsyncClient) -> None:
        from trainyard.cli.output import write

        services = await client.usage()
        if output.for_programs:
            write(services, output)
        else:
            _show_usage(services)

    with_client(work, reads=True)


def _show_usage(services: list[ServiceUsage]) -> None:
    from trainyard.cli import tables, words
    from trainyard.cli.terminal import next_steps, say

    rows = [
        [
            service.service,
            f"{each.what}: {each.job_name or each.job_id}" if each.job_id else each.what,
            each.workspace,
            words.size(each.bytes) if each.bytes else "",
            f"{each.count} {each.unit}".strip() if each.count or each.unit else "",
        ]
        for service in services
        for each in service.usage
    ]
    tables.show(["SERVICE", "WHAT", "WORKSPACE", "SIZE", "COUNT"], rows)
    room = {service.service: words.size(service.free_bytes) for service in services if service.free_bytes}
    for service in services:
        for unread in service.unread:
            say(f"not counted ({service.service}): {unread}")
    say("free: " + ", ".join(f"{size} ({service})" for service, size in room.items()))
    next_steps("yard admin maintain", "yard admin backup FOLDER")


def verify(
    repair: Annotated[
        bool, typer.Option("--repair", help="Save what can be saved; what is damaged is put aside, never deleted.")
    ] = False,
    output: Output = Format.TABLE,
) -> None:
    """Read everything that is stored and check it. Exits with 1 when damage is found that was not repaired."""

    async def work(client: AsyncClient) -> int:
        from trainyard.cli import terminal
        from trainyard.cli.output import write

        findings: list[Verified] = []
        async for step in client.verify(repair=repair):
            terminal.progress(f"{step.service}: {step.checked} of {step.total} checked")
            if step.finding is not None:
                findings.append(step)
        terminal.progress("")
        if output.for_programs:
            write(findings, output)
        else:
            _show_findings(findings)
        return ExitCode.JOB_FAILED if any(not _repaired(each) for each in findings) else ExitCode.DONE

    with_client(work)


def _repaired(step: Verified) -> bool:
    return step.finding is not None and step.finding.repaired


def _show_findings(findings: list[Verified]) -> None:
    from trainyard.cli import words
    from trainyard.cli.terminal import next_steps, say, styled

    for step in findings:
        if step.finding is None:
            continue
        state = styled("repaired", "green") if step.finding.repaired else styled("damaged", "red")
        say(f"{state} {step.service}: {step.finding.what}")
        for title, text in (("lost", step.finding.lost), ("next", step.finding.hint)):
            if text:
                say(f"  {title}: {text}")
    left = sum(not _repaired(each) for each in findings)
    if not findings:
        say("everything is as it was written")
    else:
        say(f"{words.plural(len(findings), 'finding')}, {left} not repaired")
    if left:
        next_steps("yard admin backup FOLDER", "yard admin verify --repair")


def maintain(output: Output = Format.TABLE) -> None:
    """Compact, apply retention and free space now, instead of when the services would by themselves."""

    async def work(client: AsyncClient) -> None:
        from trainyard.cli import words
        from trainyard.cli.output import write
        from trainyard.cli.terminal import next_steps, say

        done = await client.maintain()
        if output.for_programs:
            write(done, output)
            return
        for each in done:
            say(f"{each.service}: {words.size(each.freed_bytes)} freed")
            for what in each.done:
                say(f"  {what}")
        next_steps("yard admin usage")

    with_client(work)


def backup(
    folder: Annotated[Path, typer.Argument(help="New or empty folder; it appears when the copy is whole.")],
) -> None:
    """Copy everything the yard keeps, while it works. Put into an empty TRAINYARD_HOME, the copy is a yard again."""

    async def work(client: AsyncClient) -> None:
        from trainyard.cli import terminal, words
        from trainyard.cli.terminal import next_steps, say

        step = None
        async for step in client.backup(folder):
            terminal.progress(f"{step.service}: {words.plural(step.files, 'file')}, {words.size(step.bytes)}")
        terminal.progress("")
        if step is not None:
            say(f"{folder}: {words.plural(step.files, 'file')}, {words.size(step.bytes)}")
        next_steps(f"TRAINYARD_HOME={folder} yard up")

    with_client(work)
