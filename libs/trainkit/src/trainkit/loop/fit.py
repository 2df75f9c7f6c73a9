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
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from copy import copy
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainkit.callbacks.base import HOOKS, overriding
from trainkit.data.feed import Feed, Plain, feed
from trainkit.durations import Steps, duration
from trainkit.errors import DamagedCheckpoint, Interrupted, InvalidSetup, InvalidStep, NonFiniteLoss
from trainkit.loop import batch_norm, evaluation, leaving, manual
from trainkit.loop.batches import moved
from trainkit.loop.buffers import Unstored
from trainkit.loop.cadences import Cadences
from trainkit.loop.checking import check, check_module
from trainkit.loop.desync import compare
from trainkit.loop.frozen import Frozen
from trainkit.loop.length import total_steps
from trainkit.loop.losses import Mean, loss_of
from trainkit.loop.modes import put_in_training_mode
from trainkit.loop.parts import (
    Tail,
    is_on_meta,
    named_sets,
    noted,
    refuse_shared,
    run_context,
    totals,
    warn_of_resuming,
)
from trainkit.loop.peers import note_loss
from trainkit.loop.places import after_step, before_evaluation
from trainkit.loop.plan import Plan
from trainkit.loop.signals import Signals
from trainkit.loop.tracking import Trackers
from trainkit.loop.window import Window
from trainkit.module import Loss
from trainkit.precision import Precision
from trainkit.random import mixed, seed_everything
from trainkit.state import State
from trainkit.strategies.named import strategy
from trainkit.trackers.base import Outcome
from trainkit.trainer import Totals, Trainer

if TYPE_CHECKING:
    from trainkit.loop.keeper import Keeper
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
        manual: whether the module updates by itself.
        recovery: what looks after steps that do not fit into memory, or None.
        window: how the losses of the present accumulation window are weighted.
        due: what is due every so often.
        unstored: the module's buffers that are not in its state.
        stop_reason: why the run ended early, or None.
        interrupted: a signal ends the run: its last checkpoint is one that an uninterrupted run does not make.
        total_steps: the step at which the run will end, or None when its duration and its data do not say.
        left: what is open of the last step's end, when its evaluation was cut short.
        epoch_ends: `on_epoch_done` of the epoch that ended is still to be called.
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
        self.interrupted = False
        self.resumed_step: int | None = None
        self.total_steps: int | None = None
        self.strategy = strategy(trainer.strategy)
        self.max_duration = duration(trainer.max_duration)
        self.plan = Plan(trainer)
        self.window: Window
        self._signals = Signals(self.strategy, self.state, trainer.checkpoints)
        self.left: Tail | None = None
        self.epoch_ends = False
        self._trackers = Trackers()
        self._keeper: Keeper | None = None
        self.recovery: Recovery | None = None
        self._quiet_until = 0
        self._hooks = SimpleNamespace(**{hook: overriding(trainer.callbacks, hook) for hook in HOOKS})

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
        closing.callback(self.strategy.close)  # also when it opens in part only
        self.strategy.open(trainer.device)
        if trainer.deterministic:
            closing.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled())
            torch.use_deterministic_algorithms(True)
        seed_everything(trainer.seed if self.strategy.rank == 0 else mixed(trainer.seed, self.strategy.rank))
        self.feed = self._bound(feed(trainer.train, self.strategy.world_size))
        # Copies: a loader that is trained on and evaluated keeps its place in training.
        sets = named_sets(trainer.evaluate)
        refuse_shared(self.feed, sets)
        world = self.strategy.world_size
        self.evaluated = {name: self._bound(copy(feed(source, world))) for name, source in sets.items()}
        for each in self.evaluated.values():
            if isinstance(each, Plain):
                each.meets_once = not self.strategy.shards_parameters
        self._make_module()
        self._make_schedule()
        for metric in trainer.metrics.values():
            metric.to(self.strategy.device)
        self.loss = Mean(self.strategy.device)
        self._last_step = self.max_duration.count if isinstance(self.max_duration, Steps) else sys.maxsize
        self.window = Window(self.feed, self.state, self.strategy, trainer.accumulate, self._last_step)
        self.call("on_fit_start")
        if trainer.checkpoints is not None:
            self._open_checkpoints(closing)
        batch_norm.watch(self, closing)
        self.total_steps = self._count_steps()
        resumed = (self.resumed_step, self._trackers.resumed_time)
        context = run_context(trainer, *resumed, self.strategy.world_size)
        self._trackers.open(trainer.trackers if self.strategy.is_main else (), context)
        self._report_progress()
        closing.enter_context(self._signals)
        self.due = Cadences(
            trainer,
            self.max_duration,
            self.state,
            evaluates=bool(self.evaluated),
            compares=self.strategy.world_size > 1,
        )
        self._adds = self.due.log is not None or trainer.non_finite == "raise"

    def _train(self) -> None:
        if self.trainer.evaluate_first and self.state.step == 0:
            leaving.evaluate(self)
        if self.epoch_ends:  # the checkpoint was made before
            self._end_epoch()
        if self.left is not None:
            self._end_step(self.left)
        while not self._over():
            self.call("on_epoch_start")
            before = self.state.step
            for batch, last in self._batches():
                self._step(batch, last)
                # Most steps have nothing due, and a look costs less here than a call.
                if (last or self.state.step >= self._quiet_until or self._signals.asked) and self._after_step(last):
                    break
            if self.state.step == before:
                raise InvalidSetup(
                    f"epoch {self.state.epoch} of the training data has no batch after step {self.state.position}"
                )

    def _finish(self) -> None:
        self.state.finished = True
        self.refuse_non_finite()
        if self.trainer.evaluate_last and self.evaluated and self.state.evaluated_at != self.state.step:
            leaving.evaluate(self, late=True)
        if self._keeper is not None:
            self._keeper.finish()
        if self.max_duration.reached(self.state):
            self.total_steps = self.state.step
        self._report_progress()
        self.call("on_fit_end")
        self._trackers.close("stopped" if self.stop_reason else "finished")

    def _fail(self, error: BaseException) -> None:
        """Tells everybody. What fails in turn is noted, so that nobody misses the error and it stays the one raised."""
        note_loss(error)
        outcome: Outcome = "stopped" if isinstance(error, Interrupted | KeyboardInterrupt) else "failed"
        for hook in self._hooks.on_error:
            noted(hook, self, error)
        self._trackers.close(outcome)

    # What callbacks may ask for

    def log(self, values: Mapping[str, float | Tensor]) -> None:
        """Gives values to the trackers, at the present step. Only the first process's are taken."""
        self._trackers.log(values, self.state.step)
        self._report_progress()

    def stop(self, reason: str) -> None:
        """Ends the run at the end of this step's window. All processes have to ask for it at the same step."""
        self.stop_reason = reason
        self._quiet_until = 0

    def checkpoint(self) -> None:
        """Makes a checkpoint at the end of this step's window. All processes have to ask for it at the same step."""
        if self._keeper is not None:
            self._keeper.asked = True
            self._quiet_until = 0

    def evaluate(self) -> dict[str, float]:
        """Evaluates on all sets now. All processes have to do it at the same step. It is never cut short."""
        return self._results(None)

    def _results(self, look: evaluation.Look | None) -> dict[str, float]:
        self.call("on_evaluation_start")
        results = evaluation.run(self, self.evaluated, self.trainer.metrics, look)
        self.results.update(results)
        self.state.evaluations += 1
        self.state.evaluated_at = self.state.step
        self._quiet_until = 0
        self.log(results)
        if self.plan.per == "evaluation":
            self.step_schedule(results[str(self.trainer.schedule_monitor)])
        for hook in self._hooks.on_evaluation_end:
            hook(self, results)
        return results

    # A step

    def placed(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Batches where and how the trainer wants them."""
        trainer, place = self.trainer, self.strategy
        dtype = place.precision.dtype if trainer.cast_batches else None
        return moved(batches, place.device if trainer.place_batches else None, dtype)

    def _batches(self) -> Iterator[tuple[Any, bool]]:
        """The rest of the epoch's batches, on the device, each with whether it is the last one."""
        state, feed = self.state, self.feed
        self.window.start_epoch(feed.steps(state.epoch))
        self.total_steps = self._count_steps()
        self._report_progress()
        batches = self.placed(feed.batches(state.epoch, state.position))
        return zip(batches, feed.ends(state.epoch, state.position), strict=False)

    def _step(self, batch: Any, last: bool) -> None:
        """Forward and backward; and an update, when the step is the last of its window."""
        state, window, hooks = self.state, self.window, self._hooks
        if state.position >= window.same_until:
            window.begin_step()
        for hook in hooks.on_step_start:
            hook(self, batch)
        if self.manual:
            loss = manual.step(self, batch)
        elif last or state.window + 1 >= self.trainer.accumulate or state.step + 1 >= self._last_step:
            loss = (
                self._forward_backward(batch)
                if self.recovery is None
                else self.recovery.last_step(batch, self._forward_backward)
            )
            self._update()
            state.window = 0
        else:
            loss = self._step_within(batch)
            state.window += 1
        state.samples += window.samples
        state.step += 1
        state.position += 1
        for hook in hooks.on_step_end:
            hook(self, loss.detach())

    def _step_within(self, batch: Any) -> Tensor:
        """Forward and backward, with more of the same window to follow. Returns the mean loss."""
        if self.recovery is not None:
            return self.recovery.step(batch, self._forward_backward)
        with self.strategy.accumulating():
            return self._forward_backward(batch)

    def _forward_backward(self, batch: Any, share: float = 1.0) -> Tensor:
        """Adds a batch's gradients to the window's, or those of a part of it, which is `share` of its samples.

        Returns:
            The mean loss.
        """
        hooks, window = self._hooks, self.window
        self.output = output = self._forward(batch)
        # What most steps return is looked at first.
        loss = output if type(output) is Tensor and not output.ndim else loss_of(output, "training_step")
        if isinstance(loss, Loss):
            mean = loss.mean if hooks.on_forward_end or hooks.on_step_end else loss.sum
            weighted = loss.sum if window.rows else loss.sum * 0
        else:
            mean = loss
            weight = window.weight * share
            weighted = loss if weight == 1.0 else loss * weight
        for hook in hooks.on_forward_end:
            hook(self, mean)
        self.strategy.backward(weighted)
        if isinstance(loss, Loss):
            window.count(loss)
        if self._adds:
            self.loss.add(loss, window.rows * share)
        for hook in hooks.on_backward_end:
            hook(self)
        return mean

    # An update

    def _update(self) -> None:
        strategy, hooks = self.strategy, self._hooks
        if self.window.sums:
            self.window.divide()
        elif self.due.in_tokens:
            raise InvalidStep(
                f"{self.due.in_tokens} is counted in tokens, and training_step returned a loss that says of none how "
                "many it is over: return Loss(sum, count), or use another unit"
            )
        elif self.window.weighed != self.window.expected:
            self.window.correct()
        if self.apply() and self.schedule is not None and self.plan.per == "update":
            self.step_schedule()
        for hook in hooks.on_clear_start:
            hook(self)
        strategy.clear(self.optimizer, not self.trainer.zero_gradients)
        self.state.update += 1
        for hook in hooks.on_update_end:
            hook(self)

    def apply(self) -> bool:
        """Clips the gradients and takes the optimizer's step. False when the update was left out."""
        trainer, optimizer, strategy, hooks = self.trainer, self.optimizer, self.strategy, self._hooks
        self._frozen.check(optimizer)
        if strategy.precision.scaler is not None:
            strategy.precision.unscale(optimizer)
        if trainer.clip_norm is not None or self.need_grad_norm:
            self.grad_norm = strategy.clip(trainer.clip_norm)
        for hook in hooks.on_update_start:
            hook(self)
        if (trainer.non_finite != "skip" or self._may_step()) and strategy.step(optimizer):
            for hook in hooks.on_optimizer_end:
                hook(self)
            return True
        self.state.skipped += 1
        return False

    def _may_step(self) -> bool:
        """Whether the gradients may be used. With fp16 the loss scale looks after them."""
        scaled = self.strategy.precision.scaler is not None
        return scaled or self.grad_norm is None or math.isfinite(self.grad_norm)

    def step_schedule(self, *result: float) -> None:
        """Steps the schedule, of which there has to be one, until it has reached its `schedule_total`."""
        if not self.plan.ended(self.schedule):
            self.schedule.step(*result)
            self.call("on_schedule_end")

    # After a step

    def _after_step(self, last: bool) -> bool:
        """Does what is due. Returns whether the run is over."""
        state, due = self.state, self.due
        self._signals.place = before_evaluation(state.step)
        if last:
            self._count_epoch()
        if due.log is not None and due.log.due(state):
            self._log_loss()
        if due.sync is not None and due.sync.due(state):
            compare(self.strategy)
        evaluates = due.evaluate is not None and due.evaluate.due(state)
        return self._end_step(Tail(evaluates, last))

    def _end_step(self, tail: Tail) -> bool:
        """The rest of it, where a run whose evaluation was cut short goes on."""
        state = self.state
        if tail.evaluates:
            leaving.evaluate(self, tail)
        self.left = None
        if tail.last:
            self.call("on_epoch_end")
            self.epoch_ends = True
        if tail.saves or self.due.saves(state):
            self.checkpoint()
        over = self._over()
        if self._keeper is not None:
            self._keeper.look(over)
        if tail.last:
            self._end_epoch()
        self._signals.place = after_step(state.step)
        if self._signals.asked and not over:
            leaving.interrupt(self)
        self._quiet_until = self._next_due()
        return over

    def _count_epoch(self) -> None:
        self.state.epoch += 1
        self.state.position = 0
        if self.schedule is not None and self.plan.per == "epoch" and not self.manual:
            self.step_schedule()
        self.refuse_non_finite()

    def _end_epoch(self) -> None:
        self.epoch_ends = False
        self.call("on_epoch_done")

    def _over(self) -> bool:
        state = self.state
        if state.window:
            return False
        return self.stop_reason is not None or state.finished or self.max_duration.reached(state)

    def _next_due(self) -> int:
        """The first step at which anything can be due, ends of epochs aside: there is nothing to look at before it."""
        busy = self._keeper is not None and self._keeper.busy
        if busy or self.manual or self.stop_reason is not None or self.state.evaluated_at == self.state.step:
            return 0  # steps by hand make any number of updates
        return self.due.next_step(self.state)

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

    def refuse_non_finite(self) -> None:
        """Looks at the losses that were not logged yet, when the policy is to stop.

        Raises:
            NonFiniteLoss: one of them is no number.
        """
        if self.trainer.non_finite != "raise":
            return
        total, _ = self.loss.over(self.strategy)
        if self.due.log is None:
            self.loss.clear()
        if not math.isfinite(total):
            raise NonFiniteLoss(
                f"the training loss became {total} up to step {self.state.step}, and no checkpoint is made of that: "
                "lower the learning rate, set clip_norm, or pass non_finite='skip' to leave out such updates"
            )

    def flush_trackers(self) -> None:
        """Returns when all rows so far are safe."""
        self._trackers.flush()

    def tell_checkpoint(self, path: Path) -> None:
        """Tells callbacks that a checkpoint is durable."""
        for hook in self._hooks.on_checkpoint:
            hook(self, path)

    def _open_checkpoints(self, closing: ExitStack) -> None:
        from trainkit.loop.keeper import Keeper

        assert self.trainer.checkpoints is not None
        warn_of_resuming(self.feed)
        self._keeper = Keeper(self, self.trainer.checkpoints, closing)
        if self._keeper.resume():
            self.resumed_step = self.state.step
            self.call("on_resume")

    # Parts

    def call(self, hook: str) -> None:
        """Calls a hook that gets nothing but the run."""
        for call in getattr(self._hooks, hook):
            call(self)

    def _bound(self, source: Feed) -> Feed:
        place = self.strategy
        source.bind(
            seed=self.trainer.seed, rank=place.rank, world_size=place.world_size, device=place.device, peers=place
        )
        return source

    def _make_module(self) -> None:
        trainer = self.trainer
        module = self._made_module()
        put_in_training_mode(module)
        if trainer.recompute:
            from trainkit.loop.recompute import recompute

            recompute(module, trainer.recompute)
        if trainer.compile:
            module.compile(**(trainer.compile if isinstance(trainer.compile, Mapping) else {}))
        self.strategy.prepare(module, Precision(trainer.precision, self.strategy.device))
        self.strategy.initial = None  # it holds what it computed from
        self.module = self.strategy.module
        self.unstored, self._frozen = Unstored(self.module), Frozen(self.module)
        self.optimizer = self.strategy.make_optimizer(self.plan.make_optimizer)
        self._forward = self.strategy.forward
        self.manual = manual.open_updates(self)
        if trainer.out_of_memory != "raise":
            from trainkit.loop.recovery import Recovery

            self.recovery = Recovery(self.strategy, split=trainer.out_of_memory == "split")
            self._forward = self.strategy.alone

    def _made_module(self) -> nn.Module:
        """The trainer's module. One that has no values yet gets them from `strategy.initial`."""
        trainer, place = self.trainer, self.strategy
        if isinstance(trainer.module, nn.Module) and trainer.weights is None and not is_on_meta(trainer.module):
            return trainer.module
        from trainkit.initial.values import make
        from trainkit.initial.weights import Weights

        weights = Weights(trainer.weights) if isinstance(trainer.weights, str | Path) else trainer.weights
        if weights is not None:
            damage = place.gather(weights.damage() if place.is_main else None)[0]
            if damage is not None:
                raise DamagedCheckpoint(damage)
        module, place.initial = make(trainer.module, trainer.seed, weights, sharded=place.shards_parameters)
        check_module(trainer, module)
        return module

    def _make_schedule(self) -> None:
        per_update = self.trainer.accumulate
        self.schedule = self.plan.make_schedule(self.optimizer, lambda length: totals(self.feed, length, per_update))

    def _count_steps(self) -> int | None:
        return total_steps(
            self.feed, self.max_duration, self.state, accumulate=self.trainer.accumulate, by_hand=self.manual
        )

    def _report_progress(self) -> None:
        self._trackers.progress(self.state.step, self.total_steps)

    def totals(self) -> Totals:
        """How long the run will be. Raises `InvalidSetup` when neither data nor duration says."""
        return totals(self.feed, self.max_duration, self.trainer.accumulate)
