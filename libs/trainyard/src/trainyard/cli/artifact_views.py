"""Artifacts, as people read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainyard.cli import tables, words
from trainyard.cli.terminal import next_steps, say

if TYPE_CHECKING:
    from trainyard_protos.v1 import artifacts_pb2 as pb


def reference(version: pb.Version) -> str:
    """What names exactly this version, for people."""
    return f"{version.name}@{version.number}"


def best_by(version: pb.Version) -> str:
    """The value of the metric by which its job compares checkpoints, for instance "val/loss 0.31"; "" without one."""
    facts = version.checkpoint
    if not facts.best_metric or facts.best_metric not in facts.metrics:
        return ""
    return f"{facts.best_metric} {words.number(facts.metrics[facts.best_metric])}"


def listing(versions: Sequence[pb.Version]) -> None:
    """Versions, one a line."""
    if not versions:
        say("no artifacts")
        next_steps("yard artifacts put NAME PATH", "yard run FILE")
        return
    rows = [
        [
            reference(each),
            each.kind,
            str(each.checkpoint.step) if each.HasField("checkpoint") else "",
            best_by(each),
            words.size(each.size),
            str(each.files),
            words.between(each.created_ns, 0),
            ", ".join(each.aliases),
        ]
        for each in versions
    ]
    tables.show(["VERSION", "KIND", "STEP", "METRIC", "SIZE", "FILES", "AGE", "ALIASES"], rows)
    newest = reference(versions[0])
    next_steps(f"yard artifacts show {newest}", f"yard artifacts get {newest}")


def details(version: pb.Version) -> None:
    """What is known about a version."""
    metrics = version.checkpoint.metrics or version.metrics
    compared = best_by(version)
    tables.pairs(
        [
            ("version", reference(version)),
            ("id", version.id),
            ("kind", version.kind),
            ("digest", version.digest.hex()),
            ("made by", version.producer.job_id),
            ("step", str(version.checkpoint.step) if version.HasField("checkpoint") else ""),
            ("compared by", f"{compared} ({version.checkpoint.best_mode} is best)" if compared else ""),
            ("created", words.moment(version.created_ns)),
            ("deleted", words.moment(version.deleted_ns)),
            ("size", f"{words.size(version.size)} in {words.plural(version.files, 'file')}"),
            ("aliases", ", ".join(version.aliases)),
            ("labels", ", ".join(f"{name}={value}" for name, value in sorted(version.labels.items()))),
            ("metrics", ", ".join(f"{name}={words.number(value)}" for name, value in sorted(metrics.items()))),
        ]
    )


def files(found: Sequence[pb.File]) -> None:
    """Files, one a line."""
    rows = [
        [words.size(file.size), f"{file.mode:03o}", f"{file.path} -> {file.symlink}" if file.symlink else file.path]
        for file in found
    ]
    tables.show(["SIZE", "MODE", "FILE"], rows)


def lineage(found: pb.Lineage) -> None:
    """What came from what."""
    rows = [["made by", found.made_by.job_id]] if found.made_by.job_id else []
    rows += [["made from", _named(version)] for version in found.made_from]
    rows += [["made into", _named(version)] for version in found.made]
    rows += [["used by", use.job_id] for use in found.used_by]
    if rows:
        tables.show(["HOW", "WHAT"], rows)
    else:
        say("nothing is known: it was stored by hand and no job has used it")


def job_lineage(found: pb.Lineage) -> None:
    """What a job used and made."""
    rows = [["used", _named(version)] for version in found.made_from]
    rows += [["made", _named(version)] for version in found.made]
    if rows:
        tables.show(["HOW", "WHAT"], rows)
    else:
        say("it used and made no artifacts")


def _named(version: pb.Version) -> str:
    return f"{reference(version)} ({version.kind}{', deleted' if version.deleted_ns else ''})"


def retention(rules: pb.Retention) -> None:
    """Which versions are kept, in words."""
    kept = []
    if rules.keep_last:
        kept.append(f"the newest {rules.keep_last}")
    if rules.keep_best:
        kept.append(f"the best {rules.keep_best} by {rules.best_metric} ({rules.best_mode})")
    if rules.ttl_s:
        kept.append(f"those younger than {words.duration(rules.ttl_s)}")
    say(f"{rules.name}: kept are {' and '.join(kept) if kept else 'all versions'}")
    if kept:
        say("versions that an alias other than latest points to are kept too")
