"""Writes checkpoints while training goes on.

`Saver.save` copies the tensors into memory that it keeps between checkpoints and returns; a thread does the rest: agree
with the other processes on who writes what, write, sync, and let the first process commit. The thread talks through a
process group of its own, so it cannot get in the way of gradients. One checkpoint is in the making at a time.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.checkpoints import folder as folders
from trainkit.checkpoints.files import Stored, check_writable, write
from trainkit.checkpoints.policy import Checkpoints
from trainkit.checkpoints.shards import INDEX, Planner, file_of, index_of, refuse_other_types, write_shard
from trainkit.checkpoints.snapshot import SHARED, Snapshot, own_file
from trainkit.checkpoints.tree import split
from trainkit.errors import CheckpointError, InvalidSetup
from trainkit.sharded import local


class Saver:
    """Saves the checkpoints of one process.

    Args:
        folder: the same for all processes; machines may each have their own of that name.
        before_commit: called on the first process when everything is durable and before the checkpoint counts.
    """

    def __init__(
        self, folder: Path, policy: Checkpoints, *, rank: int, world_size: int, before_commit: Callable[[], None]
    ) -> None:
        self.folder, self._policy = folder, policy
        self._rank, self._world = rank, world_size
        self._before_commit = before_commit
        self._group: Any = dist.new_group(backend="gloo") if world_size > 1 else None
        self._thread: threading.Thread | None = None
        self._buffers: dict[str, Tensor] = {}
        self._begun: SimpleQueue[tuple[Callable[[], Path], Future[Path]] | None] = SimpleQueue()
        self._pending: Future[Path] | None = None
        self._check_folder()

    def _check_folder(self) -> None:
        """Looks on every process whether it can write; all raise when one cannot, so that none waits for it."""
        problem = None
        try:
            check_writable(self.folder)
        except OSError as error:
            problem = error.strerror
        found = self._gathered(problem)
        if any(found):
            where = (
                "" if self._world == 1 else f" by rank {', '.join(str(at) for at, each in enumerate(found) if each)}"
            )
            raise InvalidSetup(
                f"checkpoints cannot be written to {self.folder}{where}: {next(filter(None, found))}; choose another "
                "folder, or make this one writable"
            )

    def save(self, snapshot: Snapshot) -> None:
        """Returns when the tensors are copied. The previous checkpoint has to be waited for before: who waits tells of
        it, and its memory is used again.

        Raises:
            CheckpointError: the state holds what cannot be stored.
        """
        assert not self.busy, "one checkpoint is in the making at a time"
        tensors: dict[str, Tensor] = {}
        shared = split(snapshot.shared, "", tensors)
        own = split(snapshot.own, f"/ranks/{self._rank}", tensors)
        refuse_other_types(tensors)
        copies = self._copied(tensors)
        self._start(lambda: self._write(snapshot, shared, own, Planner(tensors, copies, is_main=self._rank == 0)))
        if not self._policy.asynchronous:
            self.wait(keep=True)

    def finished(self) -> Path | None:
        """The checkpoint that became durable since the last question, if one did.

        Raises:
            CheckpointError: it could not be written.
        """
        return self.wait() if self._pending is not None and self._pending.done() else None

    @property
    def busy(self) -> bool:
        """Whether there is a checkpoint that `finished` or `wait` did not tell of yet."""
        return self._pending is not None

    def wait(self, keep: bool = False, timeout_s: float | None = None) -> Path | None:
        """Like `finished`, but waits for it. With `keep`, `finished` will still tell.

        Raises:
            TimeoutError: it took longer than `timeout_s`; it is still in the making.
        """
        if self._pending is None:
            return None
        pending = self._pending
        if not wait([pending], timeout_s).done:
            raise TimeoutError
        if not keep:
            self._pending = None
        try:
            return pending.result()
        except (OSError, RuntimeError) as error:
            self._pending = None
            raise CheckpointError(f"a checkpoint could not be written to {self.folder}: {error}") from error

    def abandon(self) -> None:
        """Gives up what is in the making: it ends with the process, and is no checkpoint until it is whole."""
        self._pending = self._thread = None

    def close(self, timeout_s: float | None = None) -> None:
        """Lets the thread end. What was begun is completed, or given up after `timeout_s`."""
        if self._thread is not None:
            self._begun.put(None)
            self._thread.join(timeout_s)
            self._thread = None

    def _start(self, write_it: Callable[[], Path]) -> None:
        """Hands the rest to the thread, which stays: to start one, training would wait until it runs."""
        if self._thread is None:
            # A daemon, because a process whose time is up must not wait for it.
            self._thread = threading.Thread(target=self._complete, name="checkpoint", daemon=True)
            self._thread.start()
        self._pending = Future()
        self._begun.put((write_it, self._pending))

    def _complete(self) -> None:
        while (begun := self._begun.get()) is not None:
            write_it, future = begun
            try:
                future.set_result(write_it())
            except BaseException as error:
                future.set_exception(error)
            del begun, write_it, future  # they hold tensors, and who waits here needs none

    def _copied(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        copies = {name: self._copy(name, tensor) for name, tensor in tensors.items()}
        if any(tensor.device.type == "cuda" for tensor in tensors.values()):
            torch.cuda.synchronize()
        return copies

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        here = local(tensor.detach())
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != here.shape or buffer.dtype != here.dtype:
            pinned = here.device.type == "cuda"
            buffer = torch.empty(here.shape, dtype=here.dtype, device="cpu", pin_memory=pinned)
            self._buffers[name] = buffer
        buffer.copy_(here, non_blocking=True)
        return buffer

    def _write(self, snapshot: Snapshot, shared: Any, own: Any, planner: Planner) -> Path:
        at = folders.draft(self.folder, snapshot.step)
        at.mkdir(exist_ok=True)
        plans = self._gathered(planner.create_local_plan())
        # Every process makes the same global plan out of the same parts, which saves sending it around.
        plans, metadata = planner.create_global_plan(plans)
        mine = planner.finish_plan(plans[self._rank])
        written = [
            write_shard(at / file_of(self._rank), mine, planner),
            write(at / own_file(self._rank), [json.dumps(own).encode()]),
        ]
        everyones = self._gathered(written)
        if self._rank == 0:
            self._commit(
                at, snapshot, shared, index_of(metadata, plans), [file for files in everyones for file in files]
            )
        # Nobody goes on to the next one, or ends, before this one counts.
        done = (folders.steps(self.folder), snapshot.logged_until) if self._rank == 0 else None
        kept, logged_until = self._gathered(done)[0]
        if self._rank > 0:
            folders.commit_part(self.folder, snapshot.step, kept, logged_until)
        return self.folder / f"step-{snapshot.step}"

    def _commit(self, at: Path, snapshot: Snapshot, shared: Any, index: dict[str, Any], files: list[Stored]) -> None:
        files.append(write(at / SHARED, [json.dumps(shared).encode()]))
        files.append(write(at / INDEX, [json.dumps(index).encode()]))
        self._before_commit()
        manifest = folders.Manifest(
            snapshot.step, self._world, snapshot.results, files, logged_until=snapshot.logged_until
        )
        folders.commit(self.folder, manifest)
        folders.retain(self.folder, snapshot.step, self._policy.keep_last, self._policy.best)

    def _gathered(self, value: Any) -> list[Any]:
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self._world
        dist.all_gather_object(values, value, group=self._group)
        return values
