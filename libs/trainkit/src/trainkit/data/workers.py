"""What a worker process of a loader prepares: signals that are meant for its parent, and the parent's garbage."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data._utils import worker as torch_worker


def started(loader: DataLoader[Any]) -> Iterator[Any]:
    """Begins a pass over a loader, whose workers may start with it.

    A worker is a fork with a copy of the parent's garbage, which it must never collect: memory on a GPU, or pinned for
    one, can be released by the parent only, and a worker that tries it aborts.
    """
    if not loader.num_workers:
        return iter(loader)
    if gc.get_freeze_count():  # by the script: unfreezing would undo it, and not unfreezing would keep garbage
        gc.collect()
        return iter(loader)
    gc.freeze()
    try:
        return iter(loader)
    finally:
        gc.unfreeze()


def start(worker: int, also: Callable[[int], object] | None = None) -> None:
    """Prepares a worker; `also` is the user's `worker_init_fn`, which finds its own dataset in `get_worker_info()`."""
    stay(worker)
    if also is not None:
        info: Any = get_worker_info()
        own = SimpleNamespace(id=info.id, num_workers=info.num_workers, seed=info.seed, dataset=info.dataset.dataset)
        with presented(own):
            also(worker)


@contextmanager
def presented(info: Any) -> Iterator[None]:
    """Makes `get_worker_info()` return `info`; None: in no worker."""
    before: Any = torch_worker._worker_info
    torch_worker._worker_info = info
    try:
        yield
    finally:
        torch_worker._worker_info = before


def stay(worker: int) -> None:
    """Lets SIGTERM pass unless it comes from the parent. Called in each worker before its first sample.

    torchrun and the yard send SIGTERM to the whole process group. The parent still needs its workers to get to the next
    place where it can end, and torch's workers die of it, which torch reports as an error in the midst of a step.
    """
    signal.set_wakeup_fd(-1)  # the parent's
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_obey, args=(os.getppid(),), name="signals", daemon=True).start()


def _obey(parent: int) -> None:
    while os.getppid() == parent:
        if signal.sigwaitinfo({signal.SIGTERM}).si_pid == parent:
            break
    os._exit(0)
