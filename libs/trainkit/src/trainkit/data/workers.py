"""What a process that loads data does about signals, which are meant for the one that trains."""

from __future__ import annotations

import os
import signal
import threading


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
