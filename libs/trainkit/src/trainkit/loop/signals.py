"""SIGTERM and Ctrl-C as wishes: the run ends between two steps, on all processes at the same one."""

from __future__ import annotations

import logging
import signal
import threading
import time
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from trainkit.state import State
    from trainkit.strategies.base import Strategy

_log = logging.getLogger("trainkit")


class Signals:
    """Notes SIGTERM and Ctrl-C while it is entered, when that is possible (the main thread).

    A second Ctrl-C does not wait. A program's own handler of Ctrl-C stays.

    Several processes agree through the store by which they met. Every one of them gets the signal (torchrun, the yard
    and Kubernetes send it to all). The last that notices it names the next update as the end: no process can complete
    that update without it, so all of them read the message in time.

    Attributes:
        asked: the run is to end.
        name: of the signal.
        at: when it came, by `time.monotonic`.
    """

    def __init__(self) -> None:
        self.asked = False
        self.name = ""
        self.at = 0.0
        self._before: dict[int, Any] = {}
        self._counted = False

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            self._before[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._note)
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._note_key)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def of_keyboard(self) -> bool:
        """Whether somebody pressed Ctrl-C."""
        return self.name == "SIGINT"

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.asked:
            self.asked, self.name, self.at = True, signal.Signals(number).name, time.monotonic()

    def _note_key(self, number: int, frame: FrameType | None) -> None:
        if self.of_keyboard:
            raise KeyboardInterrupt
        self._note(number, frame)
        self.name = "SIGINT"  # also after SIGTERM, so that the next one does not wait
        _log.warning("ending between two steps, with a checkpoint if there are any; Ctrl-C again ends at once")

    def agreed(self, strategy: Strategy, state: State) -> bool:
        """Whether this is the step at which all processes end."""
        if strategy.world_size == 1:
            return True
        if state.window:
            return False
        store = dist.distributed_c10d._get_default_store()
        if not self._counted:
            self._counted = True
            if store.add("trainkit/asked", 1) == strategy.world_size:
                store.set("trainkit/end", str(state.update + 1))
        return bool(store.check(["trainkit/end"])) and state.update >= int(store.get("trainkit/end"))
