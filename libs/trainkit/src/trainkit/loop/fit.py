"""One run, from top to bottom.

    run
      open:    processes meet, module and optimizer are made, callbacks start, the newest checkpoint is read
      train:   epochs of steps; a step goes forward and backward; the last one of a window updates the weights
               after each step, what is due happens in this order: log, evaluate, end the epoch, save, stop
      close:   whatever happened, what was begun is completed and told

Between two steps, everything that decides what comes next is in `snapshot`: nothing hides in an iterator or a local.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from copy import copy
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainkit.callbacks.base import HOOKS, overriding
from trainkit.data.feed import Feed, feed
from trainkit.durations import Cadence, Steps, duration
from trainkit.errors import Interrupted, InvalidSetup, NonFiniteLoss
from trainkit.loop import evaluation, snapshots
from trainkit.loop.batches import moved
from trainkit.loop.desync import compare
from trainkit.loop.losses import Mean, loss_of
from trainkit.loop.parts import cadence, check, named_sets, noted, run_context, totals, with_last
from trainkit.loop.signals import Signals
from trainkit.module import Loss
from trainkit.precision import Precision
from trainkit.random import mixed, seed_everything
from trainkit.state import State
from trainkit.strategies.named import strategy
from trainkit.trackers.base import Outcome, Tracker
from trainkit.trainer import Totals, Trainer

if TYPE_CHECKING:
    from trainkit.checkpoints.saver import Saver
    from trainkit.loop.recovery import Recovery


class Fit:
    """A run of a `Trainer`. Callbacks get it; `Trainer.fit` returns it when it is over.

    Attributes:
        state: the counters.
        results: the last value of each evaluation result, e.g. `val/loss`.
        train_loss: the mean loss that was logged last, or None.
        grad_norm: the gradient's norm before clipping, of the last update: a scalar, or None when nobody needs it.
        need_grad_norm: set it in `on_fit_start` to have `grad_norm` without clipping.
        output: what the step returned.
        recovery: what looks after steps that do not fit into memory, or None.
        stop_reason: why the run ended early, or None.
    """

    def __init__(self, trainer: Trainer) -> None:
        check(trainer)
        self.trainer = trainer
        self.state = State()
        self.results: dict[str, float] = {}
        self.train_loss: float | None = None
        self.grad_norm: Tensor | None = None
        self.need_grad_norm = trainer.non_finite == "skip"
        self.output: Any = None
        self.stop_reason: str | None = None
        self.resumed_step: int | None = None
        self.strategy = strategy(trainer.strategy)
        self.max_duration = duration(trainer.max_duration)
        self._signals = Signals()
        self._save_asked = False
        self._trackers: list[Tracker] = []
        self._saver: Saver | None = None
        self.recovery: Recovery | None = None
        self._denominator: Tensor | float | None = None
        self._sums = False
        self._saved_at = -1
        self._at_end = False
        self._hooks = SimpleNamespace(**{hook: overriding(trainer.callbacks, hook) for hook in HOOKS})
        self._log_every: Cadence | None = None
        self._sync_every: Cadence | None = None
        self._evaluate_every: Cadence | None = None
        self._save_every: Cadence | None = None

    # The run

    def run(self) -> None:
        """Trains until the end. See `Trainer.fit`."""
        with ExitStack() as closing:
            try:
                self._open(closing)
                self._train()
                self._finish()
            except BaseException as error:
                self._fail(error)
                raise

    def _open(self, closing: ExitStack) -> None:
        trainer = self.trainer
        self.strategy.open(trainer.device)
        closing.callback(self.strategy.close)
        torch.use_deterministic_algorithms(trainer.deterministic)
        seed_everything(trainer.seed if self.strategy.rank == 0 else mixed(trainer.seed, self.strategy.rank))
        self.feed = self._bound(feed(trainer.train))
        # Copies: a loader that is trained on and evaluated keeps its place in training.
        sets = named_sets(trainer.evaluate)
        self.evaluated = {name: self._bound(copy(feed(source))) for name, source in sets.items()}
        self._make_module()
        self._make_schedule()
        for metric in trainer.metrics.values():
            metric.to(self.strategy.device)
        self.loss = Mean(self.strategy.device)
        self._call("on_fit_start")
        if trainer.checkpoints is not None:
            self._open_checkpoints(closing)
        self._open_trackers()
        closing.enter_context(self._signals)
        self._start_cadences()

    def _train(self) -> None:
        if self.trainer.evaluate_first and self.state.step == 0:
            self.evaluate()
        while not self._over():
            self._call("on_epoch_start")
            for batch, last in self._batches():
                self._step(batch, last)
                if self._after_step(last):
                    break

    def _finish(self) -> None:
        self.state.finished = True
        if self.trainer.evaluate_last and self.evaluated and self._evaluated_at != self.state.step:
            self.evaluate()
        policy = self.trainer.checkpoints
        if policy is not None and policy.at_end and self._saved_at != self.state.step:
            self._save()
        self._close_checkpoints()
        self._call("on_fit_end")
        self._close_trackers("stopped" if self.stop_reason else "finished")

    def _fail(self, error: BaseException) -> None:
        """Tells everybody. What fails in turn is noted, so that nobody misses the error and it stays the one raised."""
        outcome: Outcome = "stopped" if isinstance(error, Interrupted | KeyboardInterrupt) else "failed"
        for hook in self._hooks.on_error:
            noted(hook, self, error)
        while self._trackers:
            noted(self._trackers.pop().close, outcome)

    # What callbacks may ask for

    def log(self, values: Mapping[str, float | Tensor]) -> None:
        """Gives values to the trackers, at the present step. Only the first process's are taken."""
        for tracker in self._trackers:
            tracker.log(values, self.state.step)

    def stop(self, reason: str) -> None:
        """Ends the run at the end of this step's window. All processes have to ask for it at the same step."""
        self.stop_reason = reason

    def checkpoint(self) -> None:
        """Makes a checkpoint at the end of this step's window. All processes have to ask for it at the same step."""
        self._save_asked = True

    def evaluate(self) -> dict[str, float]:
        """Evaluates on all sets now. All processes have to do it at the same step."""
        self._evaluated_at = self.state.step
        self._call("on_evaluation_start")
        results = evaluation.run(self, self.evaluated, self.trainer.metrics)
        self.results.update(results)
        self.state.evaluations += 1
        self.log(results)
        for hook in self._hooks.on_evaluation_end:
            hook(self, results)
        return results

    # A step

    def _batches(self) -> Iterator[tuple[Any, bool]]:
        """The rest of the epoch's batches, on the device, each with whether it is the last one."""
        state, steps = self.state, self.feed.steps(self.state.epoch)
        self._regular_until = self._first_irregular(steps)
        batches = moved(self.feed.batches(state.epoch, state.position), self.strategy.device)
        found = False
        if steps is not None:
            for batch in batches:
                found = True
                yield batch, state.position + 1 >= steps
        else:
            for batch, last in with_last(batches):
                found = True
                yield batch, last
        if not found:
            raise InvalidSetup(f"epoch {state.epoch} of the training data has no batch after step {state.position}")

    def _step(self, batch: Any, last: bool) -> None:
        state = self.state
        for hook in self._hooks.on_step_start:
            hook(self, batch)
        closes = last or state.window + 1 >= self.trainer.accumulate or state.step + 1 >= self._last_step
        if self.recovery is not None:
            loss = self.recovery.step(batch, self._forward_backward)
            if closes:
                self.recovery.finish_window()
        elif closes:
            loss = self._forward_backward(batch)
        else:
            with self.strategy.accumulating():
                loss = self._forward_backward(batch)
        if closes:
            self._update()
            state.window = 0
        else:
            state.window += 1
        state.samples += self.feed.samples(state.position)
        state.step += 1
        state.position += 1
        for hook in self._hooks.on_step_end:
            hook(self, loss.detach())

    def _forward_backward(self, batch: Any, share: float = 1.0) -> Tensor:
        """Adds a batch's gradients to the window's, or those of a part of it, which is `share` of its samples.

        Returns:
            The mean loss.
        """
        self.output = output = self._forward(batch)
        loss = loss_of(output, "training_step")
        rows = self.feed.rows(self.state.position)
        if isinstance(loss, Loss):
            mean = loss.sum / loss.count if self._hooks.on_forward_end or self._hooks.on_step_end else loss.sum
            weighted = loss.sum if rows else loss.sum * 0
        else:
            mean = loss
            weight = self._weight(rows) * share
            weighted = loss if weight == 1.0 else loss * weight
        for hook in self._hooks.on_forward_end:
            hook(self, mean)
        self.strategy.backward(weighted)
        if isinstance(loss, Loss):
            self._count(loss, rows)
        if self._log_every is not None:
            self.loss.add(loss, rows * share)
        for hook in self._hooks.on_backward_end:
            hook(self)
        return mean

    def _count(self, loss: Loss, rows: int) -> None:
        self._sums = True
        if rows:
            self._denominator = loss.count + (0 if self._denominator is None else self._denominator)

    def _weight(self, rows: int) -> float:
        """What a mean loss counts in its window: this batch's share of all its samples, times the processes, over which
        gradients are averaged."""
        if self.state.position < self._regular_until:
            return self._regular_weight
        first = self.state.position - self.state.window
        steps = self.feed.steps(self.state.epoch)
        end = first + min(self.trainer.accumulate, self._last_step - self.state.step + self.state.window)
        end = end if steps is None else min(end, steps)
        total = sum(self.feed.samples(position) for position in range(first, end))
        return rows * self.strategy.world_size / total

    def _first_irregular(self, steps: int | None) -> int:
        """The position up to which all windows are full and all processes have equal shares."""
        accumulate, state = self.trainer.accumulate, self.state
        self._regular_weight = 1 / accumulate
        if steps is None or self.feed.samples(0) % self.strategy.world_size:
            return 0
        end = min(steps - 1, state.position + self._last_step - state.step - 1)
        return max(0, end // accumulate * accumulate)

    # An update

    def _update(self) -> None:
        trainer, optimizer = self.trainer, self.optimizer
        if self._sums:
            self._divide()
        self.strategy.precision.unscale(optimizer)
        if trainer.clip_norm is not None or self.need_grad_norm:
            self.grad_norm = self.strategy.clip(trainer.clip_norm)
        for hook in self._hooks.on_update_start:
            hook(self)
        if self._may_step() and self.strategy.step(optimizer):
            for hook in self._hooks.on_optimizer_end:
                hook(self)
            if self.schedule is not None and trainer.schedule_per == "update":
                self._step_schedule()
        else:
            self.state.skipped += 1
        self.strategy.clear(optimizer)
        self.state.update += 1
        for hook in self._hooks.on_update_end:
            hook(self)

    def _may_step(self) -> bool:
        """Whether the gradients may be used. With fp16 the loss scale looks after them."""
        if self.trainer.non_finite != "skip" or self.strategy.precision.scaler is not None:
            return True
        return self.grad_norm is None or math.isfinite(self.grad_norm)

    def _divide(self) -> None:
        """Divides the gradients of sums by what was counted in the whole window, over all processes."""
        count = torch.as_tensor(self._denominator or 0.0, dtype=torch.float64, device=self.strategy.device)
        self._denominator, self._sums = None, False
        total = float(self.strategy.sum(count))
        self.state.tokens += round(total)
        factor = self.strategy.world_size / total if total else 0.0
        torch._foreach_mul_(self.strategy.gradients(), factor)

    def _step_schedule(self) -> None:
        assert self.schedule is not None
        self.schedule.step()
        self._call("on_schedule_end")

    # After a step

    def _after_step(self, last: bool) -> bool:
        """Does what is due. Returns whether the run is over."""
        state = self.state
        if last:
            state.epoch += 1
            state.position = 0
            if self.schedule is not None and self.trainer.schedule_per == "epoch":
                self._step_schedule()
        if self._log_every is not None and self._log_every.due(state):
            self._log_loss()
        if self._sync_every is not None and self._sync_every.due(state):
            compare(self.strategy)
        if self._evaluate_every is not None and self._evaluate_every.due(state):
            self.evaluate()
        if last:
            self._call("on_epoch_end")
        if self._save_every is not None and self._save_every.due(state):
            self._save_asked = True
        over = self._over()
        if self._saver is not None:
            self._look_after_checkpoints(over)
        if self._signals.asked and not over:
            self._interrupt()
        return over

    def _over(self) -> bool:
        state = self.state
        if state.window:
            return False
        return self.stop_reason is not None or state.finished or self.max_duration.reached(state)

    def _log_loss(self) -> None:
        total, weight = self.loss.over(self.strategy)
        self.loss.clear()
        self.train_loss = total / weight if weight else math.nan
        if self.trainer.non_finite == "raise" and not math.isfinite(self.train_loss):
            raise NonFiniteLoss(
                f"the mean training loss up to step {self.state.step} is {self.train_loss}: lower the learning rate, "
                "set clip_norm, or pass non_finite='skip' to leave out such updates"
            )
        self.log({"train/loss": self.train_loss})

    def _look_after_checkpoints(self, over: bool) -> None:
        assert self._saver is not None
        if self._save_asked and not self.state.window and not (over and self._at_end):
            self._save()
        if (path := self._saver.finished()) is not None:
            self._tell_checkpoint(path)

    def _interrupt(self) -> None:
        """Ends the run because a signal asked for it, at the same step on every process."""
        if not self._signals.agreed(self.strategy, self.state):
            return
        if self.state.window and not self.strategy.stores_window:
            return
        self._close_checkpoints(save=self._saver is not None and self._saved_at != self.state.step)
        raise Interrupted(f"asked to end by {self._signals.name} at step {self.state.step}")

    # Checkpoints

    def _save(self) -> None:
        assert self._saver is not None
        self._save_asked = False
        self._saved_at = self.state.step
        if self._log_every is not None and self.trainer.non_finite == "raise":
            self._refuse_non_finite()
        self._call("on_checkpoint_start")
        self.state.checkpoints += 1
        self._saver.save(snapshots.take(self))

    def _refuse_non_finite(self) -> None:
        total, _ = self.loss.over(self.strategy)
        if not math.isfinite(total):
            raise NonFiniteLoss(
                f"the training loss is {total} at step {self.state.step}; no checkpoint is made of that"
            )

    def _tell_checkpoint(self, path: Path) -> None:
        for hook in self._hooks.on_checkpoint:
            hook(self, path)

    def _open_checkpoints(self, closing: ExitStack) -> None:
        from trainkit.checkpoints.saver import Saver

        policy = self.trainer.checkpoints
        assert policy is not None
        self._at_end = policy.at_end
        folder = policy.place()
        self._saver = Saver(
            folder,
            policy,
            rank=self.strategy.rank,
            world_size=self.strategy.world_size,
            before_commit=self._flush_trackers,
        )
        closing.callback(self._saver.close)
        source = snapshots.source(self.strategy, policy, folder)
        if source is not None:
            snapshots.load(self, source)
            self.resumed_step = self._saved_at = self.state.step
            self._call("on_resume")

    def _close_checkpoints(self, save: bool = False) -> None:
        if self._saver is None:
            return
        if save:
            self._save()
        if (path := self._saver.wait()) is not None:
            self._tell_checkpoint(path)

    # Parts

    def _call(self, hook: str) -> None:
        for call in getattr(self._hooks, hook):
            call(self)

    def _bound(self, source: Feed) -> Feed:
        place = self.strategy
        source.bind(seed=self.trainer.seed, rank=place.rank, world_size=place.world_size, device=place.device)
        return source

    def _make_module(self) -> None:
        trainer, module = self.trainer, self.trainer.module
        module.train()
        if trainer.recompute:
            from trainkit.loop.recompute import recompute

            recompute(module, trainer.recompute)
        if trainer.compile:
            module.compile(**(trainer.compile if isinstance(trainer.compile, Mapping) else {}))
        self.strategy.prepare(module, Precision(trainer.precision, self.strategy.device))
        self.module = self.strategy.module
        self.optimizer = self.strategy.make_optimizer(trainer.optimizer)
        self._forward = self.strategy.forward
        if trainer.out_of_memory == "split":
            from trainkit.loop.recovery import Recovery

            self.recovery = Recovery(self.strategy)
            self._forward = self.strategy.alone

    def _make_schedule(self) -> None:
        make = self.trainer.schedule
        self.schedule = make(self.optimizer, self.totals()) if make is not None else None

    def totals(self) -> Totals:
        """How long the run will be. Raises `InvalidSetup` when neither data nor duration says."""
        return totals(self.feed, self.max_duration, self.trainer.accumulate)

    def _start_cadences(self) -> None:
        trainer, state = self.trainer, self.state
        self._evaluated_at = state.step if self.resumed_step is not None and state.evaluations else -1
        self._last_step = self.max_duration.count if isinstance(self.max_duration, Steps) else sys.maxsize
        self._regular_until = 0
        self._log_every = cadence(trainer.log_every, state)
        if self.evaluated:
            self._evaluate_every = cadence(trainer.evaluate_every, state)
        if trainer.checkpoints is not None:
            self._save_every = cadence(trainer.checkpoints.every, state)
        if self.strategy.world_size > 1:
            self._sync_every = cadence(trainer.check_sync_every, state)

    def _open_trackers(self) -> None:
        if not self.strategy.is_main:
            return
        context = run_context(self.trainer, self.resumed_step, self.strategy.world_size)
        for tracker in self.trainer.trackers:
            tracker.open(context)
            self._trackers.append(tracker)

    def _flush_trackers(self) -> None:
        for tracker in self._trackers:
            tracker.flush()

    def _close_trackers(self, outcome: Outcome) -> None:
        while self._trackers:
            self._trackers.pop().close(outcome)
