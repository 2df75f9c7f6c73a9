"""SIGTERM as a wish: the run ends between two steps, on all processes at the same one."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from trainkit.state import State
    from trainkit.strategies.base import Strategy


class Signals:
    """Notes SIGTERM while it is entered, when that is possible (the main thread).

    Several processes agree through the store by which they met. Every one of them gets the signal (torchrun, the yard
    and Kubernetes send it to all). The last that notices it names the next update as the end: no process can complete
    that update without it, so all of them read the message in time.
    """

    def __init__(self) -> None:
        self.asked = False
        self.name = ""
        self._before: Any = None
        self._counted = False

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked, self.name = True, signal.Signals(number).name

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
