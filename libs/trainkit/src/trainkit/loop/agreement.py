"""How several processes agree on the place at which they end, without a word between them before a signal came.

Every process gets the signal (torchrun, the yard and Kubernetes send it to all), each at another moment of its work:
one between two steps, one within a collective operation that waits for the others, one in an evaluation. So a thread
hears it, through the descriptor that Python's handler of signals writes to at once, whatever the main thread does.
Through the store by which the processes met, the threads

1. wait until all have heard it: when one never does, the run goes on, and nobody waits for anybody; a warning names it;
2. stop their main threads at the next place, and tell where that is at the latest: the last place that was passed;
3. take the latest of all as the end: the first place behind it can be reached by every process, and none is past it.

A main thread that waits at its place holds up others in the midst of their collectives for as long as that takes: the
threads of those answer in their stead.

Before the last checkpoint, which takes all processes, they meet at a barrier through the store (`meet`). It has a
deadline: a process that hangs on its way there does not keep the others.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist

from trainkit.loop.places import Place

if TYPE_CHECKING:
    from trainkit.strategies.base import Strategy

_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 1.0
WARN_AFTER_S = 5.0
"""How long the other processes may take to get the signal before a warning says that the run waits for it."""
_MET, _GIVEN_UP = b"met", b"given up"
_log = logging.getLogger("trainkit")
_made = count()


class Agreement:
    """One process's part. Has to be made and closed in the main thread.

    Args:
        numbers: of the signals to hear.
        begin: stops the main thread at its next place and returns the place before that, or a later one.

    Attributes:
        begun: all processes got a signal.
        problem: why no agreement was found.
    """

    def __init__(self, strategy: Strategy, numbers: set[int], begin: Callable[[], Place]) -> None:
        self._strategy, self._numbers, self._begin = strategy, numbers, begin
        self.begun = False
        self.problem: Exception | None = None
        self._end: Place | None = None
        self._found, self._closed = threading.Event(), threading.Event()
        self._store: Any = dist.distributed_c10d._get_default_store()
        self._name = f"trainkit/end-{next(_made)}"  # another one for each run of a process
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        self._before = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._run, name="agreement", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> Place | None:
        """The place behind which all processes end, or None when it is not known by then."""
        self._found.wait(min(max(timeout_s, 0.0), threading.TIMEOUT_MAX))
        return self._end

    def meet(self, deadline: float) -> list[int]:
        """Waits for all processes, at most until `deadline` by `time.monotonic`. All of them get the same answer.

        Returns:
            The ranks that did not come in time; then no process may do what takes all of them.
        """
        store, name, world, pause_s = self._store, self._name, self._strategy.world_size, _PAUSE_S
        store.set(f"{name}/arrived-{self._strategy.rank}", "1")
        if store.add(f"{name}/arrived", 1) == world:
            store.compare_set(f"{name}/met", "", _MET.decode())
        while not store.check([f"{name}/met"]):
            if time.monotonic() > deadline:
                store.compare_set(f"{name}/met", "", _GIVEN_UP.decode())
                break
            time.sleep(pause_s)  # no wait of the store's own, which Ctrl-C does not end
            pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
        if store.get(f"{name}/met") == _MET:
            return []
        return self._without("arrived") or [self._strategy.rank]

    def _without(self, key: str) -> list[int]:
        ranks = range(self._strategy.world_size)
        return [rank for rank in ranks if not self._store.check([f"{self._name}/{key}-{rank}"])]

    def close(self) -> None:
        """Hears nothing more."""
        signal.set_wakeup_fd(self._before)
        self._closed.set()
        os.write(self._writing, b"\0")
        self._thread.join()
        os.close(self._reading)
        os.close(self._writing)

    def _run(self) -> None:
        try:
            if self._heard():
                self._agree()
        except Exception as error:  # the store is gone with the process that kept it
            self.problem = error
        finally:
            self._found.set()
            while not self._closed.is_set():  # others than us may want to hear of other signals
                self._heard()

    def _heard(self) -> bool:
        """Waits for one of the signals; False when this is closed."""
        while not self._closed.is_set():
            numbers = os.read(self._reading, 64)
            if self._before != -1:
                with suppress(OSError):  # it has not read what it was told already
                    os.write(self._before, numbers)
            if self._numbers.intersection(numbers):
                return True
        return False

    def _agree(self) -> None:
        store, name, world = self._store, self._name, self._strategy.world_size
        store.set(f"{name}/asked-{self._strategy.rank}", "1")
        if store.add(f"{name}/asked", 1) == world:
            store.set(f"{name}/all", "1")
        if not self._told("all", self._warn_of_unasked):
            return
        self.begun = True
        store.set(f"{name}/place-{self._strategy.rank}", json.dumps(self._begin()))
        if store.add(f"{name}/placed", 1) == world:
            places = [json.loads(store.get(f"{name}/place-{rank}")) for rank in range(world)]
            store.set(f"{name}/end", json.dumps(max(places)))
        if self._told("end"):
            self._end = cast(Place, tuple(json.loads(store.get(f"{name}/end"))))

    def _warn_of_unasked(self) -> None:
        _log.warning(
            "This process was asked to end, and rank %s was not yet. The run continues until all processes have the "
            "signal: send it to all of them, as torchrun, the yard and Kubernetes do.",
            ", ".join(map(str, self._without("asked"))),
        )

    def _told(self, what: str, warn: Callable[[], None] | None = None) -> bool:
        """Waits until somebody says it; False when this is closed before. `warn` is called once when it takes long."""
        pause_s, warn_at = _PAUSE_S, time.monotonic() + WARN_AFTER_S
        while not self._store.check([f"{self._name}/{what}"]):
            if warn is not None and time.monotonic() > warn_at:
                warn()
                warn = None
            if self._closed.wait(pause_s):
                return False
            pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
        return True
