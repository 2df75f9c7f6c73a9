"""What the folders of attempts take on disk."""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path

from servicekit.tree import measure
from servicekit.usage import Usage, free_bytes
from trainyard_protos.v1.admin_pb2 import GetUsageResponse

from trainyard_launcher.backends.process.folders import attempts_in

FOLDERS = "attempt folders"
_AT_MOST_S = 20.0  # below the deadline of the call, for trees that take longer to count


def usage(home: Path, job_ids: Collection[str] = (), at_most_s: float = _AT_MOST_S) -> GetUsageResponse:
    """Counts the folders of attempts by job, the largest first. Blocks.

    Args:
        home: the yard's folder.
        job_ids: only of these jobs; empty: of all.
        at_most_s: what is not counted by then is said to be missing.
    """
    folder = home / "attempts"
    give_up_at = time.monotonic() + at_most_s
    response = GetUsageResponse(free_bytes=free_bytes(home))
    jobs: dict[str, Usage] = {}
    links: set[tuple[int, int]] = set()
    unread = uncounted = 0
    for attempt in attempts_in(folder):
        record = attempt.read()
        job_id = record.facts.job_id if record is not None else ""
        if job_ids and job_id not in job_ids:
            continue
        if time.monotonic() > give_up_at:
            uncounted += 1
            continue
        of = jobs.setdefault(job_id, Usage(what=FOLDERS, unit="attempts", job_id=job_id))
        if record is not None:
            of.workspace, of.job_name = record.facts.workspace, record.facts.job_name
        size = measure(attempt.path, links, give_up_at)
        of.bytes += size.bytes
        of.count += 1
        unread += size.unread_count - len(size.unread)
        response.unread.extend(size.unread)
    if unread:
        response.unread.append(f"{folder}: {unread:,} more places cannot be read")
    if uncounted:
        response.unread.append(
            f"{folder}: {uncounted:,} attempts are not counted: reading took longer than {at_most_s:g} s"
        )
    response.usage.append(
        Usage(
            what=FOLDERS,
            bytes=sum(each.bytes for each in jobs.values()),
            count=sum(each.count for each in jobs.values()),
            unit="attempts",
        )
    )
    response.usage.extend(sorted(jobs.values(), key=lambda each: each.bytes, reverse=True))
    return response
