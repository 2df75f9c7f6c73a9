"""The one log of this process: opened at the first call, opened anew in a forked child."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from trainyard.tracker import offline
from trainyard.tracker.devices import OnDevice, numbers
from trainyard.tracker.records import FACTS, PROGRESS, PROGRESS_MADE, TooLarge, json_record, record
from trainyard.tracker.writing import FOLDER_VARIABLE, MAX_NAME, Log, Unavailable

MAX_WAITING = 1_000
_PLAIN = frozenset((float, int, bool))


class Session:
    """What the functions of `trainyard.tracker` do. For any number of threads, and for signal handlers.

    Whatever cannot be written at once waits in `_waiting`, in order: what a signal handler logs in the middle of a
    call of its own thread, and rows whose values are still on a GPU, with everything behind them.
    """

    def __init__(self) -> None:
        self._warned: set[str] = set()
        self._reset()
        # A child has its parent's memory but must not write into its parent's log.
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._lock = threading.RLock()
        self._busy = False  # the thread that holds the lock is writing: only a signal handler can see that
        self._waiting: deque[tuple[Callable[[], bool], Callable[[], None]]] = deque()
        self._log = Log()
        self._next_step = 0
        self._finished = False
        self._begun = False  # by `init`, which was called since the last `finish`

    def log(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        try:
            names = tuple(metrics)
            values: Any = metrics.values()
            if not _PLAIN.issuperset(map(type, values)):
                values = numbers(values)
            with self._lock:
                if self._busy or self._waiting or type(values) is OnDevice:
                    return self._row_later(names, values, step)
                self._busy = True
                try:
                    self._row(names, values, step, time.time_ns())
                finally:
                    self._busy = False
                if self._waiting:
                    self._catch_up()
        except Exception as error:
            self._log_what_can_be(metrics, step, error)

    def _row(self, names: tuple[str, ...], values: Any, step: int | None, time_ns: int) -> None:
        number = self._next_step if step is None else int(step)
        self._log.row(names, number, time_ns, values)
        self._next_step = number + 1

    def _row_later(self, names: tuple[str, ...], values: Any, step: int | None) -> None:
        time_ns = time.time_ns()
        if isinstance(values, OnDevice):
            atexit.unregister(self.flush)
            atexit.register(self.flush)
            self._later(lambda: self._row(names, values.result(), step, time_ns), values.ready)
        else:
            given = list(values)
            self._later(lambda: self._row(names, given, step, time_ns))

    def _later(self, write: Callable[[], None], ready: Callable[[], bool] = lambda: True) -> None:
        """Writes when everything before it is written and it is ready itself, at the earliest now."""
        with self._lock:
            if self._busy and len(self._waiting) >= MAX_WAITING:
                raise Unavailable("more was logged by signal handlers, in the middle of a call, than can wait")
            self._waiting.append((ready, write))
            if not self._busy:
                self._catch_up()

    def _catch_up(self, *, wait: bool = False) -> None:
        while self._waiting:
            ready, write = self._waiting[0]
            # So far ahead of the GPU no training can be; still the queue has an end.
            if not wait and len(self._waiting) <= MAX_WAITING and not ready():
                return
            self._waiting.popleft()
            self._busy = True
            try:
                write()
            except Exception as error:
                self._dropped(error)
            finally:
                self._busy = False

    def _log_what_can_be(self, metrics: Any, step: Any, error: Exception) -> None:
        """The slow way, after something went wrong: drops the values that are no numbers and keeps the others."""
        if isinstance(error, Unavailable | TooLarge):
            return self._dropped(error)
        try:
            good = {name: value for name, value in dict(metrics).items() if self._usable(name, value)}
            number = None if step is None else int(step)
        except Exception as unusable:
            return self._warn(f"log({_shown(metrics)}, step={_shown(step)}) was dropped: {_shown(unusable)}")
        if good and len(good) < len(metrics):
            self.log(good, number)
        elif good:
            self._warn(f"log of {', '.join(good):.200} was dropped: {_shown(error)}")

    def _dropped(self, error: Exception) -> None:
        if isinstance(error, Unavailable):
            with self._lock:
                self._log.drop()
        self._warn(_shown(error))

    def _usable(self, name: Any, value: Any) -> bool:
        try:
            float(value)
        except Exception as error:
            self._warn(f"the value of {_shown(name)} was dropped, float() does not take it: {_shown(error)}")
            return False
        if isinstance(name, str) and 0 < len(name) <= MAX_NAME:
            return True
        self._warn(f"the value of {_shown(name)} was dropped: a name is a string of 1 to {MAX_NAME} characters")
        return False

    def init(self, name: object | None) -> None:
        try:
            with self._lock:
                another = self._finished or self._begun
                if os.environ.get(FOLDER_VARIABLE):
                    self._begun, self._finished = True, False
                    if another:
                        self._warn("a job has one run: what is recorded after this init() goes there as well")
                    return
                if another:
                    self.finish()
                    self._next_step = 0
                    offline.leave()
                self._begun, self._finished = True, False
                if name is not None:
                    offline.call_run(str(name))
        except Exception as error:
            self._warn(_shown(error))

    @property
    def active(self) -> bool:
        """Whether `init` was called or something was recorded, and `finish` was not called since."""
        return self._begun or self._log.is_open or bool(self._waiting)

    def progress(self, step: int, total: int | None = None) -> None:
        self._record(lambda: record(PROGRESS_MADE, PROGRESS.pack(int(step), int(total or 0), time.time_ns())))

    def facts(self, kind: str, make: Callable[[], Any]) -> None:
        self._record(lambda: json_record(FACTS, {kind: make()}))

    def _record(self, make: Callable[[], bytes]) -> None:
        try:
            made = make()
            self._later(lambda: self._log.record(made))
        except Exception as error:
            self._warn(f"a record was dropped: {_shown(error)}")

    def flush(self) -> None:
        with self._lock:
            self._catch_up(wait=True)

    def finish(self) -> None:
        try:
            with self._lock:
                self._catch_up(wait=True)
                self._finished, self._begun = True, False
                self._log, ended = Log(), self._log
                ended.close()
        except Exception as error:
            self._warn(f"the log was not closed: {_shown(error)}")

    def _warn(self, text: str) -> None:
        """Once for every text, and in one write, so that ranks do not mix."""
        if text not in self._warned and len(self._warned) < 100:
            self._warned.add(text)
            try:
                sys.stderr.write(f"trainyard.tracker: {text}\n")
            except Exception:  # a closed stderr is no reason to end a training either
                return


def _shown(value: object) -> str:
    """What a warning says of anything a caller gave, whose own words may raise as well."""
    try:
        return f"{str(value) if isinstance(value, Exception) else repr(value):.200}"
    except Exception:
        return f"<{type(value).__name__}>"
