"""Updates that are no plain ones: losses that are no numbers, low precision, clipping, no memory, updates by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from trainkit import Callback
from trainkit.errors import InvalidSetup, NonFiniteLoss, OutOfMemory
from trainkit.loop.fit import Fit
from trainkit.module import ManualModule

from libs.trainkit.tests.slope import Slope, Written, trainer


class Bursting(Slope):
    """Gives no number in its third step."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def training_step(self, batch: list[Tensor]) -> Tensor:
        self.calls += 1
        loss: Tensor = super().training_step(batch)
        return loss * math.nan if self.calls == 3 else loss


def test_a_loss_that_is_no_number_ends_the_run() -> None:
    with pytest.raises(NonFiniteLoss, match="up to step 5"):
        trainer(module=Bursting(), log_every="5st").fit()


def test_also_when_no_loss_is_logged() -> None:
    reached: list[int] = []

    class Counting(Callback):
        def on_epoch_start(self, fit: Fit) -> None:
            reached.append(fit.state.step)

    with pytest.raises(NonFiniteLoss, match="became nan up to step 12"):
        trainer(module=Bursting(), log_every=None, callbacks=[Counting()]).fit()
    assert reached == [0]
    with pytest.raises(NonFiniteLoss, match="became nan up to step 5"):
        trainer(module=Bursting(), log_every=None, max_duration="5st").fit()


def test_or_its_update_is_left_out() -> None:
    fit = trainer(module=Bursting(), non_finite="skip").fit()

    assert (fit.state.update, fit.state.skipped) == (24, 1)
    assert fit.module.w.item() == pytest.approx(2 - 2 * 0.8**23)


def test_fp16_leaves_out_an_update_that_overflows_and_halves_its_scale() -> None:
    fit = trainer(module=Bursting(), precision="fp16", non_finite="skip").fit()

    assert (fit.state.update, fit.state.skipped) == (24, 1)
    assert fit.strategy.precision.scaler.get_scale() == 2.0**15


def test_bf16_ends_close_to_full_precision() -> None:
    torch.manual_seed(0)
    assert trainer(precision="bf16").fit().module.w.item() == pytest.approx(2, abs=0.02)


def test_gradients_are_clipped_by_their_norm_and_the_norm_is_told() -> None:
    fit = trainer(clip_norm=1.0, max_duration="1st").fit()

    assert fit.module.w.item() == pytest.approx(0.1)
    assert float(fit.grad_norm) == pytest.approx(4.0)


class Twice(ManualModule):
    """Updates twice in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))

    def training_step(self, batch: list[Tensor]) -> Tensor:
        for _ in range(2):
            loss = ((self.w * batch[0] - 2) ** 2).mean()
            self.updates.backward(loss)
            self.updates.step()
            self.updates.zero_grad()
        return loss


def test_lengths_in_updates_hold_for_steps_that_make_several() -> None:
    written = Written()
    fit = trainer(module=Twice(), max_duration="10up", log_every="4up", trackers=[written]).fit()

    assert (fit.state.step, fit.state.update) == (5, 10)
    assert [step for step, _ in written.rows] == [2, 4]
    with pytest.raises(InvalidSetup, match="nobody counts its tokens: give log_every in steps"):
        trainer(module=Twice(), log_every="4tok").fit()


class Large(Slope):
    """Has room for so many samples at once; the first attempt at some step has room for none."""

    def __init__(self, room: int, fails_at: int = -1) -> None:
        super().__init__()
        self.room, self.left = room, fails_at

    def training_step(self, batch: list[Tensor]) -> Tensor:
        loss: Tensor = super().training_step(batch)
        self.left -= 1
        if len(batch[0]) > self.room or self.left == 0:
            loss.backward()  # a failure in the middle of the backward pass leaves gradients behind
            raise torch.OutOfMemoryError("no room")
        return loss


@pytest.mark.parametrize(("room", "fails_at", "recovered"), [(8, 3, 1), (4, -1, 1), (1, -1, 1)])
def test_a_step_that_does_not_fit_is_tried_again_and_then_cut(room: int, fails_at: int, recovered: int) -> None:
    fit = trainer(module=Large(room, fails_at), out_of_memory="split", accumulate=3).fit()

    assert fit.recovery is not None and fit.recovery.recovered == recovered
    assert fit.module.w.item() == pytest.approx(2 - 2 * 0.8**8)
    assert fit.train_loss == pytest.approx(trainer(accumulate=3).fit().train_loss)


class Normed(nn.Module):
    """Counts and averages what comes by; its attempts of some numbers fail after that."""

    def __init__(self, *fails: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.line = nn.BatchNorm1d(1), nn.Linear(1, 1)
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("table", torch.arange(3.0))
        self.attempts, self.fails = 0, fails

    def training_step(self, batch: list[Tensor]) -> Tensor:
        self.attempts += 1
        self.seen = self.seen + batch[0].mean()
        loss = (self.line(self.norm(batch[0][:, None])) - self.seen - self.table.sum()).square().mean()
        if self.attempts in self.fails:
            raise torch.OutOfMemoryError("no room")
        return loss


def test_a_step_that_is_tried_again_updates_running_statistics_once() -> None:
    failed = trainer(module=Normed(1, 5, 8), out_of_memory="retry").fit()
    whole = trainer(module=Normed()).fit()

    assert failed.recovery is not None and failed.recovery.recovered == 3
    for name, value in whole.module.state_dict().items():
        assert torch.equal(failed.module.state_dict()[name], value), name


def test_a_sample_that_does_not_fit_ends_the_run() -> None:
    with pytest.raises(OutOfMemory, match="single sample"):
        trainer(module=Large(0), out_of_memory="split").fit()


def test_recomputing_and_compiling_change_neither_results_nor_names() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 1))

        def forward(self, inputs: Tensor) -> Tensor:
            output: Tensor = self.body(inputs)
            return output

        def training_step(self, batch: list[Tensor]) -> Tensor:
            return self(batch[0][:, None]).square().mean()

    ends = []
    for options in ({}, {"recompute": [nn.Sequential]}, {"compile": {"backend": "eager"}}):
        torch.manual_seed(0)
        ends.append(trainer(module=Deep(), max_duration="6st", **options).fit().strategy.weights())

    for end in ends[1:]:
        assert list(end) == list(ends[0])
        assert all(torch.equal(end[name], ends[0][name]) for name in end)


def test_gradients_are_cleared_by_the_optimizer_when_it_has_a_way_of_its_own() -> None:
    class Counting(torch.optim.SGD):
        cleared = 0

        def zero_grad(self, set_to_none: bool = True) -> None:
            super().zero_grad(set_to_none)
            self.cleared += 1

    made: list[Counting] = []

    def make(parameters: Any) -> Counting:
        made.append(Counting(parameters, lr=0.1))
        return made[0]

    fit = trainer(optimizer=make).fit()

    assert made[0].cleared == fit.state.update == 24
    assert fit.module.w.grad is None
