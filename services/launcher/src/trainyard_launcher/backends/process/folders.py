"""Attempts on disk: what a launcher writes before it starts one, and reads to find it again."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from google.protobuf import json_format
from google.protobuf.message import DecodeError
from servicekit.disk import sync_folder
from trainyard import copies, files
from trainyard.home import boot_id, is_alive
from trainyard_protos.v1 import common_pb2, launcher_pb2

from trainyard_launcher.backend import Facts

_PLAN = "plan.json"
_RECORD = "attempt.json"
_WRITE_LOOKS, _WRITE_LOOK_S = 50, 0.01
_OVER = "over"  # the scheduler knows the end: not looked at again
_UNDELIVERED = "undelivered-"  # and a node's index: metrics lacks records of it


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """What is given to one node."""

    gpus: tuple[int, ...] = ()
    cgroups: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """Everything needed to look after an attempt, written before anything of it starts."""

    facts: Facts
    nodes: tuple[NodeRecord, ...]
    master_port: int
    written_ns: int

    @classmethod
    def from_json(cls, text: str) -> AttemptRecord:
        """Raises ValueError, KeyError or TypeError when the text is not what `to_json` wrote."""
        fields = json.loads(text)
        nodes = tuple(NodeRecord(tuple(node["gpus"]), tuple(node["cgroups"])) for node in fields["nodes"])
        return cls(Facts(**fields["facts"]), nodes, fields["master_port"], fields["written_ns"])

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class Started:
    """The agent that took a node, as it says itself; pid 0 when the launcher took it so that no agent can."""

    pid: int
    start_time: int
    boot_id: str

    @property
    def alive(self) -> bool:
        """Whether that very process still runs."""
        return self.pid > 0 and is_alive(self.pid, self.start_time, self.boot_id)


class NodeFolder:
    """A node's folder."""

    __slots__ = ("path",)

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def log(self) -> Path:
        """The agent's own log."""
        return self.path / "agent.log"

    def write_plan(self, plan: launcher_pb2.NodePlan) -> None:
        """Writes the plan for its owner alone: it holds the attempt's token and the job's secrets.

        As JSON: an agent has no time to load protobuf before it starts its workers.
        """
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        fields = json_format.MessageToDict(plan, preserving_proto_field_name=True)
        files.replace(self.path / _PLAN, json.dumps(fields).encode())

    def plan(self) -> launcher_pb2.NodePlan:
        """Raises FileNotFoundError before it was written."""
        return json_format.Parse((self.path / _PLAN).read_bytes(), launcher_pb2.NodePlan())

    def has_records(self) -> bool:
        """Whether an agent may have left points or lines here, or workers output that no agent read."""
        return any(any((self.path / name).glob("*")) for name in ("tracker", "spool", "out"))

    def writers(self, attempt_id: str, index: int) -> list[str]:
        """Those whose records may be here, as metrics knows them: the agent's lines, and a log for each process that
        tracked something, in segments `<writer>.<number>.<suffix>`."""
        logs = (path.stem.partition(".") for path in (self.path / "tracker").glob("*.*.*"))
        return [f"{attempt_id}/{index}/lines", *sorted({writer for writer, _, number in logs if number.isdecimal()})]

    def started(self) -> Started | None:
        """Who took the node; None when nobody has. Blocks for a moment while an agent is writing the file.

        A file that stays incomplete is of an agent that was killed while writing it.
        """
        for _ in range(_WRITE_LOOKS):
            try:
                fields = json.loads((self.path / "started").read_bytes())
                return Started(int(fields["pid"]), int(fields["start_time"]), str(fields["boot_id"]))
            except FileNotFoundError:
                return None
            except (ValueError, KeyError, TypeError):
                time.sleep(_WRITE_LOOK_S)  # the file is made first and written right after: no event tells
        return Started(0, 0, "")

    def take(self) -> bool:
        """Takes the node, so that no agent can; false when one has it."""
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            descriptor = os.open(self.path / "started", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return False
        with os.fdopen(descriptor, "w") as file:
            json.dump(asdict(Started(0, 0, boot_id())), file)
        return True

    def exit(self) -> common_pb2.Exit | None:
        """The exit record, or None when there is none that can be read."""
        try:
            return common_pb2.Exit.FromString((self.path / "exit.bin").read_bytes())
        except (FileNotFoundError, DecodeError):
            return None

    def log_tail(self, lines: int) -> list[str]:
        """The last lines of the agent's own log; where there are none, of the worker that wrote last."""
        if found := _tail(self.log, lines):
            return found
        outputs = sorted((self.path / "out").glob("rank-*.log"), key=lambda file: file.stat().st_mtime_ns)
        return _tail(outputs[-1], lines) if outputs else []


def _tail(file: Path, lines: int, max_bytes: int = 64 * 1024) -> list[str]:
    try:
        with file.open("rb") as opened:
            size = opened.seek(0, os.SEEK_END)
            opened.seek(max(size - max_bytes, 0))
            return opened.read().decode(errors="replace").splitlines()[-lines:]
    except FileNotFoundError:
        return []


class AttemptFolder:
    """An attempt's folder."""

    __slots__ = ("path",)

    def __init__(self, path: Path) -> None:
        self.path = path

    def node(self, index: int) -> NodeFolder:
        """The folder of one node."""
        return NodeFolder(self.path / f"node-{index}")

    def read(self) -> AttemptRecord | None:
        """The record; None when nothing can have been started, for it is written before."""
        with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError):
            return AttemptRecord.from_json((self.path / _RECORD).read_text())
        return None

    def write(self, record: AttemptRecord) -> None:
        """Writes the record so that it survives a power cut, or not at all."""
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        files.replace(self.path / _RECORD, record.to_json().encode(), durable=True)
        for folder in (self.path, self.path.parent):
            sync_folder(folder)

    def remove_unwritten(self) -> None:
        """Removes what is left of a start whose record could not be written: of that, nothing ever ran."""
        if not (self.path / _RECORD).exists():
            shutil.rmtree(self.path, ignore_errors=True)

    @property
    def over(self) -> bool:
        """Whether the scheduler knows its end."""
        return (self.path / _OVER).exists()

    def mark_over(self) -> None:
        """Its end is known: never look at it again. Losing the mark in a power cut costs one look."""
        with contextlib.suppress(FileNotFoundError):
            (self.path / _OVER).touch()

    def mark_undelivered(self, index: int) -> None:
        """Metrics lacks records of a node. The mark survives a power cut, as its end will."""
        (self.path / f"{_UNDELIVERED}{index}").touch()
        sync_folder(self.path)

    def mark_delivered(self, index: int) -> None:
        """Metrics has the records of a node, or will never take them. Losing this costs one more delivery."""
        (self.path / f"{_UNDELIVERED}{index}").unlink(missing_ok=True)

    def has_copies(self) -> bool:
        """Whether nodes may have copies of what the artifact store has."""
        return any(map(copies.has_copies, self.path.glob("node-*")))

    def remove_copies(self) -> None:
        """Removes them, once the attempt is over. May be repeated.

        Raises:
            OSError: one cannot be removed.
        """
        for folder in self.path.glob("node-*"):
            copies.remove_all(folder)

    def undelivered_writers(self) -> list[str]:
        """The writers whose records metrics may lack."""
        return [writer for index in self.undelivered() for writer in self.node(index).writers(self.path.name, index)]

    def undelivered(self) -> list[int]:
        """The nodes whose records metrics lacks."""
        found = (path.name.removeprefix(_UNDELIVERED) for path in self.path.glob(f"{_UNDELIVERED}*"))
        return sorted(int(index) for index in found if index.isdecimal())


def attempts_in(folder: Path) -> Iterator[AttemptFolder]:
    """All attempt folders, those that are over included."""
    if folder.is_dir():
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            if entry.is_dir(follow_symlinks=False):
                yield AttemptFolder(Path(entry.path))


__all__: Sequence[str] = ("AttemptFolder", "AttemptRecord", "NodeFolder", "NodeRecord", "Started", "attempts_in")
