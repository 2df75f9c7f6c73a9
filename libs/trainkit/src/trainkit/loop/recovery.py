"""Steps that do not fit into memory: freed, tried again, then, if wanted, cut in halves until they fit.

The gradients of earlier steps of the window are set aside while a step runs, so that a failed attempt leaves nothing
behind; buffers, such as running statistics, are put back, and random numbers start from where they were. Nothing is
communicated within an attempt. After every step, and after every set of an evaluation, each process says whether it got
there, so that one that fails for good takes the others with it instead of leaving them waiting, or meeting it with
other numbers; gradients meet at the end of the window.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from trainkit import random
from trainkit.data.counted import leading
from trainkit.errors import OutOfMemory
from trainkit.loop.batches import halves
from trainkit.loop.buffers import Attempted
from trainkit.memory import free, holders
from trainkit.strategies.base import Strategy

_log = logging.getLogger("trainkit")

Attempt = Callable[[Any, float], Tensor]
"""Goes forward and backward on a part of a batch, which is this share of it; returns the mean loss."""


class Recovery:
    """Runs steps of one process.

    Args:
        strategy: the run's.
        split: cut a step that does not fit the second time; else it fails.
    """

    def __init__(self, strategy: Strategy, *, split: bool = True) -> None:
        self._strategy, self._split = strategy, split
        self.recovered = 0
        """Steps that did not fit at first."""
        self._most: int | None = None
        self._buffers = Attempted(strategy.module)

    def step(self, batch: Any, attempt: Attempt) -> Tensor:
        """The mean loss of a batch, whose gradients are added to the window's.

        Raises:
            OutOfMemory: it does not fit the second time; with `split`, not even a single sample. Or another process
                could not do its part.
        """
        loss = self._step(batch, attempt)
        self.agree()
        return loss

    def last_step(self, batch: Any, attempt: Attempt) -> Tensor:
        """The same for the last step of a window, after which gradients meet."""
        loss = self.step(batch, attempt)
        self._strategy.synchronise()
        return loss

    def agree(self) -> None:
        """Tells the other processes that this one did its part, and waits for them.

        Raises:
            OutOfMemory: another one could not.
        """
        if self._strategy.world_size > 1 and float(self._strategy.sum(torch.zeros(1, device=self._strategy.device))):
            raise OutOfMemory("another process ran out of memory; its message says where")

    def _step(self, batch: Any, attempt: Attempt) -> Tensor:
        if self._most is not None:
            return self._cut(batch, 1.0, attempt)
        state = random.capture(self._strategy.device)
        loss = self._tried(batch, 1.0, attempt)
        if loss is None:
            self.recovered += 1
            random.restore(state, self._strategy.device)
            _log.warning("a step does not fit into memory: what could be freed is, and it is tried again")
            loss = self._cut(batch, 1.0, attempt) if self._split else self._tried(batch, 1.0, attempt)
        if loss is None:
            self._give_up("a step does not fit into memory, also not after what could be freed was freed")
        return loss

    def evaluation_step(self, batch: Any) -> Any:
        """An evaluation's step, which is tried a second time. `agree` has to follow when the set is through.

        Raises:
            OutOfMemory: it does not fit then either.
        """
        evaluate, state = self._strategy.evaluate, random.capture(self._strategy.device)
        try:
            return evaluate(batch)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        free()
        random.restore(state, self._strategy.device)
        try:
            return evaluate(batch)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self._tell()
            raise OutOfMemory(f"a step of an evaluation does not fit into memory: {error}\n{holders()}") from error

    def _tried(self, batch: Any, share: float, attempt: Attempt) -> Tensor | None:
        aside, loss = self._set_aside(), None
        try:
            self._buffers.begin()
            loss = attempt(batch, share)
            self._buffers.succeed()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        if loss is None:  # outside of the handler, because the exception's frames hold what has to be freed
            self._set_aside()
            self._buffers.undo()
            free()
        self._put_back(aside)
        return loss

    def _cut(self, batch: Any, share: float, attempt: Attempt) -> Tensor:
        """The mean loss, in as many parts as it takes. What did not fit once is not tried whole again."""
        rows = leading(batch)
        if self._most is None or rows <= self._most:
            whole = self._tried(batch, share, attempt)
            if whole is not None:
                return whole
            self._most = rows - rows // 2
        parts = halves(batch)
        if parts is None:
            self._give_up("a step does not fit into memory, not even with a single sample")
        (first, of_first), (second, of_second) = parts
        losses = [self._cut(first, share * of_first, attempt), self._cut(second, share * of_second, attempt)]
        return losses[0].detach() * of_first + losses[1].detach() * of_second

    def _give_up(self, problem: str) -> NoReturn:
        self._tell()
        raise OutOfMemory(
            f"{problem}: use smaller batches, a smaller model or shorter samples, recompute activations "
            f"(recompute=[...]), or a strategy that shards (fsdp). Who holds the GPUs here:\n{holders()}"
        )

    def _tell(self) -> None:
        """Answers the others' `agree`: this process will not get there."""
        if self._strategy.world_size > 1:
            self._strategy.sum(torch.ones(1, device=self._strategy.device))

    def _set_aside(self) -> list[Tensor | None]:
        parameters = list(self._strategy.module.parameters())
        aside = [p.grad for p in parameters]
        for p in parameters:
            p.grad = None
        return aside

    def _put_back(self, aside: list[Tensor | None]) -> None:
        for p, before in zip(self._strategy.module.parameters(), aside, strict=True):
            if before is not None:
                p.grad = before if p.grad is None else before.add_(p.grad)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device or the host could not give the memory that was asked for."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
