"""A run that resumes with other settings: who decides, what is reported, and what the weights become."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset
from trainkit import Callback, Checkpoints
from trainkit.callbacks import EMA, EarlyStopping
from trainkit.config import ConfigError, RunConfig, parse
from trainkit.data import Loader
from trainkit.errors import InvalidSetup, WrongCheckpoint
from trainkit.loop.fit import Fit
from trainkit.module import ManualModule
from trainkit.optim import Group, optimizer, schedule

from libs.trainkit.tests.slope import Slope, Written, ones, trainer

HALF = 12
"""Steps of an epoch of `trainer`, which makes 24 in two."""


def sgd(**settings: Any) -> Any:
    return partial(torch.optim.SGD, **{"lr": 0.1, **settings})


class Rates(Callback):
    """The learning rates of every step."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_step_start(self, fit: Fit, batch: Any) -> None:
        rates = [float(group["lr"]) for group in fit.optimizer.param_groups]
        self.seen.append(rates if len(rates) > 1 else rates[0])


class Twice:
    """One run in two halves, with other options for the second."""

    def __init__(self, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
        self.policy, self._caplog = Checkpoints(folder=folder), caplog

    def __call__(self, before: dict[str, Any], after: dict[str, Any]) -> tuple[Fit, Fit]:
        first = trainer(checkpoints=self.policy, **{"max_duration": "1ep", **before}).fit()
        self._caplog.clear()
        with self._caplog.at_level(logging.WARNING):
            second = trainer(checkpoints=self.policy, **{"max_duration": "2ep", **after}).fit()
        assert second.resumed_step == first.state.step
        return first, second

    def lines(self) -> list[str]:
        """What the second half reported, but for its duration, which differs in all tests."""
        text = [record.getMessage().removeprefix("changed since the checkpoint: ") for record in self._caplog.records]
        return [line for line in text if not line.startswith("max_duration")]


@pytest.fixture
def twice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Twice:
    return Twice(tmp_path / "checkpoints", caplog)


def weight(fit: Fit) -> float:
    return fit.module.get_parameter("w").item()


# The code decides


def test_a_resumed_run_without_changes_reports_its_duration_alone(
    twice: Twice, caplog: pytest.LogCaptureFixture
) -> None:
    twice({}, {})
    assert [record.getMessage() for record in caplog.records] == [
        "changed since the checkpoint: max_duration: 1ep → 2ep"
    ]


def test_the_learning_rate_is_that_of_the_code(twice: Twice) -> None:
    _, end = twice({}, {"optimizer": sgd(lr=0.05)})
    assert weight(end) == pytest.approx(2 - 2 * 0.8**HALF * 0.9**HALF)
    assert twice.lines() == ["lr: 0.1 → 0.05"]


def test_the_weight_decay_is_that_of_the_code(twice: Twice) -> None:
    _, end = twice({"optimizer": sgd(weight_decay=0.5)}, {"optimizer": sgd(weight_decay=2.0)})

    def decayed(start: float, decay: float) -> float:
        """w becomes w - lr (2 (w - 2) + decay w) in each step."""
        keeps, rest = 1 - 0.1 * (2 + decay), 4 / (2 + decay)
        return rest + (start - rest) * keeps**HALF

    assert weight(end) == pytest.approx(decayed(decayed(0.0, 0.5), 2.0))
    assert twice.lines() == ["weight_decay: 0.5 → 2.0"]


def test_the_momentum_is_that_of_the_code(twice: Twice) -> None:
    start, end = twice({"optimizer": sgd(momentum=0.9)}, {"optimizer": sgd()})
    assert weight(end) == pytest.approx(2 - (2 - weight(start)) * 0.8**HALF)
    assert twice.lines() == ["momentum: 0.9 → 0"]


def test_betas_and_eps_are_those_of_the_code(twice: Twice) -> None:
    adam = partial(torch.optim.Adam, lr=0.01)
    start, end = twice({"optimizer": adam}, {"optimizer": partial(adam, betas=(0.0, 0.0), eps=1e-12)})
    assert weight(end) == pytest.approx(weight(start) + HALF * 0.01)  # without memory, a step is the rate
    assert twice.lines() == ["betas: [0.9, 0.999] → [0.0, 0.0]", "eps: 1e-08 → 1e-12"]


class Two(Slope):
    """A second weight, which learns as the first one does."""

    def __init__(self) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.zeros(()))

    def training_step(self, batch: list[Tensor]) -> Any:
        return ((self.w * batch[0] - 2) ** 2).mean() + ((self.v * batch[0] - 2) ** 2).mean()


def grouped(rate: float) -> Any:
    return optimizer("SGD", lr=0.1, groups=[Group("v", {"lr": rate})])


def test_each_group_has_the_learning_rate_of_the_code(twice: Twice) -> None:
    _, end = twice({"module": Two(), "optimizer": grouped(0.05)}, {"module": Two(), "optimizer": grouped(0.2)})
    assert weight(end) == pytest.approx(2 - 2 * 0.8 ** (2 * HALF))
    assert end.module.v.item() == pytest.approx(2 - 2 * 0.9**HALF * 0.6**HALF)
    assert twice.lines() == ["lr of group 1 (v, ...): 0.05 → 0.2"]


def test_a_value_that_training_changed_stays_where_the_setting_did_not(twice: Twice) -> None:
    class Quartered(Callback):
        def on_epoch_end(self, fit: Fit) -> None:
            if fit.state.epoch == 1:
                fit.optimizer.param_groups[0]["lr"] = 0.025

    _, end = twice({"callbacks": [Quartered()]}, {"optimizer": sgd(weight_decay=0.0)})
    assert weight(end) == pytest.approx(2 - 2 * 0.8**HALF * 0.95**HALF)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"optimizer": sgd(), "module": Two()}, {"optimizer": grouped(0.2), "module": Two()}),
        ({"optimizer": grouped(0.2), "module": Two()}, {"optimizer": sgd(), "module": Two()}),
    ],
    ids=["added", "removed"],
)
def test_parameter_groups_are_not_added_or_removed(before: Any, after: Any, twice: Twice) -> None:
    with pytest.raises(WrongCheckpoint, match=r"group 0 has the parameters w.* there and w.* here"):
        twice(before, after)


def test_what_an_optimizer_never_kept_is_asked_for_before_training(twice: Twice) -> None:
    adam = partial(torch.optim.Adam, lr=0.01)
    with pytest.raises(WrongCheckpoint, match="without amsgrad, and Adam with amsgrad=True needs max_exp_avg_sq"):
        twice({"optimizer": adam}, {"optimizer": partial(adam, amsgrad=True)})


def test_clipping_is_that_of_the_code(twice: Twice) -> None:
    start, end = twice({}, {"clip_norm": 0.01})
    assert weight(end) == pytest.approx(weight(start) + HALF * 0.1 * 0.01)
    assert twice.lines() == ["clip_norm: None → 0.01"]


def test_cadences_are_those_of_the_code(twice: Twice) -> None:
    written, often = Written(), Checkpoints(folder=twice.policy.folder, every="5st")
    options = {"log_every": "4st", "trackers": [written], "checkpoints": often, "evaluate_every": "7st"}
    trainer(checkpoints=twice.policy, max_duration="1ep").fit()
    fit = trainer(**{**options, "evaluate": Loader(ones(8), 8)}).fit()
    rows = [step for step, row in written.rows if "train/loss" in row]
    assert rows == [16, 20, 24]
    assert [step for step, row in written.rows if "val/loss" in row] == [14, 21, 24]
    assert fit.state.checkpoints == 1 + 2 + 1  # of the first half, at 15 and 20, at the end


def test_cadences_that_changed_are_reported(twice: Twice) -> None:
    often = Checkpoints(folder=twice.policy.folder, every="5st")
    twice.policy, before = often, twice.policy
    trainer(checkpoints=before, max_duration="1ep").fit()
    twice({}, {"log_every": "4st", "evaluate_every": None, "check_sync_every": "2st", "precision": "bf16"})
    assert twice.lines() == [
        "log_every: 10st → 4st",
        "evaluate_every: 1ep → None",
        "checkpoint_every: 1ep → 5st",
        "check_sync_every: None → 2st",
        "precision: fp32 → bf16",
    ]


def test_weights_of_another_type_are_reported(twice: Twice) -> None:
    twice({}, {"module": Slope().double()})
    assert twice.lines() == ["weights: float32 → float64"]


# Schedules are functions of (step, total)


def cosine(step: int, total: int, rate: float = 0.1) -> float:
    return rate * (1 + math.cos(math.pi * step / total)) / 2


def test_a_longer_cosine_is_that_of_a_run_planned_so_from_its_start(twice: Twice) -> None:
    rates, made = Rates(), lambda optimizer, totals: lr_scheduler.CosineAnnealingLR(optimizer, totals.updates)
    options = {"schedule": made}
    start, end = twice(options, {**options, "max_duration": "4ep", "callbacks": [rates]})
    assert rates.seen == pytest.approx([cosine(step, 48) for step in range(12, 48)])
    errors = [1 - 2 * cosine(step, 48) for step in range(12, 48)]
    assert weight(end) == pytest.approx(2 - (2 - weight(start)) * math.prod(errors))
    assert twice.lines() == [
        "T_max of CosineAnnealingLR: 12 → 48",
        f"learning rate from step 12 on: 0 → {cosine(12, 48):g}",
    ]


def warmed(optimizer: Any, totals: Any) -> Any:
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4), lr_scheduler.PolynomialLR(optimizer, totals.updates)]
    return lr_scheduler.SequentialLR(optimizer, parts, [6])


def chained(optimizer: Any, totals: Any) -> Any:
    parts = [lr_scheduler.ConstantLR(optimizer, 0.5, 4), lr_scheduler.CosineAnnealingLR(optimizer, totals.updates)]
    return lr_scheduler.ChainedScheduler(parts)


SCHEDULES: dict[str, Any] = {
    "LambdaLR": lambda made, totals: lr_scheduler.LambdaLR(made, lambda step: 1 - step / totals.updates),
    "MultiplicativeLR": lambda made, totals: lr_scheduler.MultiplicativeLR(made, lambda step: 1 - 1 / totals.updates),
    "OneCycleLR": lambda made, totals: lr_scheduler.OneCycleLR(made, 0.1, totals.updates),
    "SequentialLR": warmed,
    "ChainedScheduler": chained,
    "CyclicLR": lambda made, totals: lr_scheduler.CyclicLR(made, 0.01, 0.1, totals.updates),
    "CosineWithWarmup": schedule("CosineWithWarmup", num_warmup_steps=2),
    "a ratio": schedule("LinearWithWarmup", warmup_ratio=0.5),
    "OneCycleLR by name": schedule("OneCycleLR", max_lr=0.2),
    "by path": schedule("torch.optim.lr_scheduler.PolynomialLR", total_iters=20),
    "per epoch": schedule("LinearWithWarmup", per="epoch", num_warmup_steps=0),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_longer_run_has_the_rates_of_one_planned_so_from_its_start(name: str, twice: Twice) -> None:
    rates, whole = Rates(), Rates()
    options = {"schedule": SCHEDULES[name], "schedule_per": "epoch" if name == "per epoch" else "update"}
    options["optimizer"] = sgd(momentum=0.5)
    twice(options, {**options, "max_duration": "3ep", "callbacks": [rates]})
    planned = trainer(max_duration="3ep", callbacks=[whole], **options).fit()
    assert rates.seen == whole.seen[12:]
    assert planned.optimizer.param_groups[0]["momentum"] == pytest.approx(
        trainer(max_duration="3ep", checkpoints=twice.policy, **options).fit().optimizer.param_groups[0]["momentum"]
    )


def test_a_schedule_that_does_not_follow_the_length_says_so(twice: Twice) -> None:
    fixed = {"schedule": lambda optimizer, totals: lr_scheduler.StepLR(optimizer, 5)}
    twice(fixed, fixed)
    assert twice.lines() == ["StepLR has no setting that follows from the run's length, and stays"]


@pytest.mark.parametrize("name", ["CosineAnnealingLR", "OneCycleLR"])
def test_schedule_total_fixes_the_schedule_and_the_rate_stays_at_its_end(name: str, twice: Twice) -> None:
    made = {
        "CosineAnnealingLR": lambda optimizer, totals: lr_scheduler.CosineAnnealingLR(optimizer, totals.updates, 0.01),
        "OneCycleLR": SCHEDULES["OneCycleLR"],
    }[name]
    whole, rates = Rates(), Rates()
    trainer(schedule=made, max_duration="24st", callbacks=[whole]).fit()
    options = {"schedule": made, "schedule_total": "24st"}
    _, end = twice({**options, "max_duration": "24st"}, {**options, "max_duration": "4ep", "callbacks": [rates]})
    assert len(rates.seen) == 24 and len(set(rates.seen)) == 1
    assert rates.seen[0] < min(whole.seen[:23]) if name == "CosineAnnealingLR" else rates.seen[0] == whole.seen[23]
    assert rates.seen[0] == end.schedule.get_last_lr()[0]
    assert twice.lines() == []


def test_a_total_that_was_fixed_can_be_given_up(twice: Twice) -> None:
    made, rates, whole = SCHEDULES["LambdaLR"], Rates(), Rates()
    before = {"schedule": made, "schedule_total": "6st"}
    twice(before, {"schedule": made, "callbacks": [rates]})
    trainer(schedule=made, callbacks=[whole]).fit()
    assert rates.seen == whole.seen[12:]


def test_another_rate_goes_through_the_schedule(twice: Twice) -> None:
    made, rates = {"schedule": lambda optimizer, totals: lr_scheduler.CosineAnnealingLR(optimizer, 48)}, Rates()
    twice(made, {**made, "optimizer": sgd(lr=0.02), "callbacks": [rates]})
    assert rates.seen == pytest.approx([cosine(step, 48, 0.02) for step in range(12, 24)])
    assert twice.lines()[0] == "lr: 0.1 → 0.02"


def test_another_setting_beside_the_schedule_leaves_it(twice: Twice) -> None:
    made, rates, whole = SCHEDULES["OneCycleLR"], Rates(), Rates()
    options = {"schedule": made, "schedule_total": "2ep"}
    after = {**options, "optimizer": sgd(weight_decay=0.1), "callbacks": [rates]}
    _, end = twice(options, after)
    trainer(schedule=made, callbacks=[whole]).fit()
    assert rates.seen == whole.seen[12:] and end.optimizer.param_groups[0]["weight_decay"] == 0.1


@pytest.mark.parametrize("kind", [lr_scheduler.LambdaLR, lr_scheduler.MultiplicativeLR])
def test_another_function_counts_from_the_start(kind: Any, twice: Twice) -> None:
    def made(base: float) -> Any:
        return {"schedule": lambda optimizer, totals: kind(optimizer, lambda step: base**step), "schedule_total": "9ep"}

    rates, whole = Rates(), Rates()
    twice(made(0.9), {**made(0.99), "callbacks": [rates]})
    trainer(**made(0.99), callbacks=[whole]).fit()
    assert rates.seen == whole.seen[12:]
    assert twice.lines()[0] == f"the function of {kind.__name__} is another one than in the checkpoint"


def test_arguments_of_a_schedule_are_those_of_the_code(twice: Twice) -> None:
    def made(steps: int) -> Any:
        return {"schedule": schedule("LinearWithWarmup", num_warmup_steps=steps, num_training_steps=40)}

    rates = Rates()
    twice(made(2), {**made(20), "callbacks": [rates]})
    assert rates.seen == pytest.approx(
        [0.1 * step / 20 for step in range(12, 20)] + [0.1 - 0.005 * n for n in range(4)]
    )
    assert twice.lines()[0] == "warmup of LinearWithWarmup: 2 → 20"


def test_a_schedule_can_begin_to_step_per_epoch(twice: Twice) -> None:
    made, rates = {"schedule": schedule("LinearWithWarmup", num_warmup_steps=0, num_training_steps=4)}, Rates()
    twice({**made, "schedule_total": "4st"}, {**made, "schedule_per": "epoch", "callbacks": [rates]})
    assert rates.seen == pytest.approx([0.1 * 3 / 4] * 12)


def test_a_schedule_stepped_by_hand_is_evaluated_at_its_own_steps(twice: Twice) -> None:
    class ByHand(ManualModule):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(()))

        def training_step(self, batch: list[Tensor]) -> Any:
            loss = ((self.w * batch[0] - 2) ** 2).mean()
            self.updates.backward(loss)
            self.updates.step_optimizer()
            self.updates.zero_grad()
            return loss.detach()

    class Odd(Rates):
        def on_step_end(self, fit: Fit, loss: Tensor) -> None:
            if fit.state.step % 2:
                fit.module.updates.step_schedule()

    def made(total: int) -> Any:
        return {"schedule": schedule("LinearWithWarmup", num_warmup_steps=0, num_training_steps=total)}

    rates = Odd()
    twice(
        {"module": ByHand(), "callbacks": [Odd()], **made(24)}, {"module": ByHand(), "callbacks": [rates], **made(48)}
    )
    assert rates.seen[:4] == pytest.approx([0.1 * (1 - step / 48) for step in (6, 7, 7, 8)])


def test_a_cycle_shorter_than_the_run_is_refused_before_training() -> None:
    made = {"schedule": lambda optimizer, totals: lr_scheduler.OneCycleLR(optimizer, 0.1, 20)}
    with pytest.raises(InvalidSetup, match=r"OneCycleLR ends after 20 steps, but the run has 24.*schedule_total"):
        trainer(**made).fit()
    assert trainer(**made, schedule_total="20st").fit().state.step == 24


# ReduceLROnPlateau


def plateau(**settings: Any) -> dict[str, Any]:
    return {
        "schedule": lambda optimizer, totals: lr_scheduler.ReduceLROnPlateau(
            optimizer, **{"factor": 0.5, "patience": 0, "threshold": 10.0, "threshold_mode": "abs", **settings}
        ),
        "schedule_monitor": "val/loss",
        "evaluate": Loader(ones(8), 8),
        "evaluate_every": "4st",
    }


def test_a_plateau_halves_the_rate_after_each_evaluation_without_a_gain() -> None:
    rates = Rates()
    trainer(**plateau(), callbacks=[rates], max_duration="16st").fit()
    assert rates.seen == pytest.approx([0.1] * 8 + [0.05] * 4 + [0.025] * 4)  # the first evaluation is a gain


def test_a_plateau_by_path_steps_too() -> None:
    rates = Rates()
    made = schedule("torch.optim.lr_scheduler.ReduceLROnPlateau", factor=0.1, patience=0, threshold=0.999)
    trainer(**{**plateau(), "schedule": made}, callbacks=[rates], max_duration="16st").fit()
    assert rates.seen[-1] == pytest.approx(0.001)


def test_a_plateau_goes_on_where_it_was(twice: Twice) -> None:
    rates, whole = Rates(), Rates()
    twice(plateau(), {**plateau(), "callbacks": [rates]})
    trainer(**plateau(), callbacks=[whole]).fit()
    assert rates.seen == whole.seen[12:]
    assert twice.lines() == []


def test_the_reductions_of_a_plateau_apply_to_another_rate(twice: Twice) -> None:
    rates = Rates()
    twice(plateau(), {**plateau(factor=0.1), "optimizer": sgd(lr=0.2), "callbacks": [rates]})
    assert rates.seen[0] == pytest.approx(0.2 / 4)
    assert rates.seen[4] == pytest.approx(0.2 / 4 / 10)
    assert twice.lines() == [
        "lr: 0.1 → 0.2",
        "factor of ReduceLROnPlateau: 0.5 → 0.1",
        "learning rate from step 12 on: 0.025 → 0.05",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({**plateau(), "schedule_monitor": None}, r"schedule_monitor='val/loss'"),
        ({**plateau(), "schedule_monitor": "val/los"}, "schedule_monitor: no result is called 'val/los'.*val/loss"),
        ({**plateau(), "evaluate": None}, "nothing is evaluated"),
        ({**plateau(), "schedule": SCHEDULES["LambdaLR"]}, "is for ReduceLROnPlateau, and LambdaLR takes no result"),
        ({**plateau(), "schedule": None}, "without a schedule"),
        ({"schedule_total": "1ep"}, "schedule_total without a schedule"),
        ({"schedule_total": "long"}, "schedule_total: 'long' is not a duration"),
        ({"schedule": lambda optimizer, totals: [SCHEDULES["LambdaLR"](optimizer, totals)]}, "makes a list, which"),
    ],
)
def test_a_schedule_that_cannot_be_stepped_is_refused_before_training(options: Any, message: str) -> None:
    with pytest.raises(InvalidSetup, match=message):
        trainer(**options).fit()


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (optimizer("torch.optim.LBFGS"), "LBFGS calls a closure.*use an optimizer that needs none, such as AdamW"),
        (lambda named: [sgd()(named), sgd()(named)], "a list of 2 optimizers, and a run has one.*parameter group"),
        (lambda named: nn.Linear(1, 1), "makes a Linear: make a torch.optim.Optimizer"),
    ],
)
def test_an_optimizer_that_cannot_be_stepped_is_refused_before_training(made: Any, message: str) -> None:
    with pytest.raises(InvalidSetup, match=message):
        trainer(optimizer=made).fit()


# The checkpoint decides


class Numbers(Dataset[Any]):
    def __init__(self, count: int = 96) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < self._count:
            raise IndexError
        return torch.tensor(float(index))


class Seen(Slope):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[float] = []

    def training_step(self, batch: Tensor) -> Any:
        self.rows += batch.tolist()
        return super().training_step([torch.ones_like(batch)])


def numbers(count: int = 96, size: int = 8, **options: Any) -> dict[str, Any]:
    return {"train": Loader(Numbers(count), size, **options)}


def backwards(epoch: int, generator: torch.Generator) -> Tensor:
    return torch.arange(95, -1, -1)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "seed": (numbers(), {**numbers(), "seed": 7}, r"seed=0 in the checkpoint and 7 in this run"),
    "shuffle": (numbers(), numbers(shuffle=False), r"shuffle=True in the checkpoint and False"),
    "order": (numbers(order=lambda *_: torch.arange(96)), numbers(order=backwards), "order="),
    "samples": (numbers(), numbers(120), "samples=96 in the checkpoint and 120"),
    "batch_size": (numbers(), numbers(size=16), "batch_size=8 in the checkpoint and 16"),
    "drop_last": (numbers(), numbers(drop_last=True), "drop_last=False in the checkpoint and True"),
    "accumulate": (numbers(), {**numbers(), "accumulate": 4}, "accumulate=1 in the checkpoint and 4"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("end", ["6st", "1ep"], ids=["within an epoch", "between epochs"])
def test_what_decides_the_samples_of_a_step_stays_as_in_the_checkpoint(name: str, end: str, twice: Twice) -> None:
    before, after, message = REFUSED[name]
    with pytest.raises(WrongCheckpoint, match=message) as caught:
        twice({**before, "module": Seen(), "max_duration": end}, {**after, "module": Seen()})
    assert f"Trainer(on_change={{'{name}': 'accept'}})" in str(caught.value)


@pytest.mark.parametrize("name", REFUSED)
def test_a_change_that_is_accepted_counts_and_is_reported(name: str, twice: Twice) -> None:
    before, after, _ = REFUSED[name]
    rest, whole = Seen(), Seen()
    accepted = {**after, "module": rest, "on_change": {name: "accept"}}
    start, end = twice({**before, "module": Seen()}, accepted)
    trainer(**{**after, "module": whole}).fit()
    assert rest.rows == whole.rows[len(whole.rows) // 2 :]  # the second epoch of a run that had it from its start
    updates = end.state.update - start.state.update
    assert weight(end) == pytest.approx(2 - 2 * 0.8 ** (HALF + updates))
    assert updates == {"samples": 15, "batch_size": 6, "accumulate": 3}.get(name, 12)
    assert [line.partition(":")[0] for line in twice.lines()] == [name]


def test_an_accepted_seed_draws_other_random_numbers(twice: Twice) -> None:
    class Drawing(Slope):
        def training_step(self, batch: list[Tensor]) -> Any:
            self.drawn = torch.rand(1).item()
            return super().training_step(batch)

    def drawn(seed: int) -> float:
        policy = Checkpoints(folder=twice.policy.folder, at_end=False, every=None)
        options = {"seed": seed, "on_change": {"seed": "accept"}, "checkpoints": policy}
        return float(trainer(module=Drawing(), **options).fit().module.drawn)

    trainer(module=Drawing(), max_duration="1ep", checkpoints=twice.policy).fit()
    assert drawn(0) == drawn(0) != drawn(1) == drawn(1)


def test_windows_of_another_accumulation_have_the_weights_of_their_own(twice: Twice) -> None:
    """12 steps of an epoch: 8 updates, then from step 8 on a window of 5 that its end cuts to 4: one more."""
    _, end = twice(
        {"max_duration": "8st"}, {"accumulate": 5, "on_change": {"accumulate": "accept"}, "max_duration": "1ep"}
    )
    assert end.state.update == 9
    assert weight(end) == pytest.approx(2 - 2 * 0.8**9)


def test_a_schedule_ends_with_a_run_whose_updates_became_fewer(twice: Twice) -> None:
    made = {"schedule": schedule("LinearWithWarmup", num_warmup_steps=0)}
    rates = Rates()
    twice(made, {**made, "accumulate": 4, "on_change": {"accumulate": "accept"}, "callbacks": [rates]})
    # 12 updates were made and 3 are left
    assert rates.seen[::4] == pytest.approx([0.1 * (1 - update / 15) for update in (12, 13, 14)])


def test_batches_of_each_process_count_over_all(twice: Twice) -> None:
    def batches(size: int) -> Any:
        return {"train": DataLoader(ones(96), batch_size=size)}

    with pytest.raises(WrongCheckpoint, match="batch_size=8 in the checkpoint and 16 in this run"):
        twice(batches(8), batches(16))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("seed", "on_change is a str: give a mapping"),
        ({"sed": "accept"}, "a checkpoint decides seed, shuffle, .*; did you mean seed"),
        ({"lr": "accept"}, "any other setting may change without it"),
        ({"seed": True}, "choose accept, or leave it out"),
        ({"batch_size": "skale"}, "choose accept or scale"),
    ],
)
def test_what_is_accepted_is_one_of_few_words(given: Any, message: str) -> None:
    with pytest.raises(InvalidSetup, match=message):
        trainer(on_change=given).fit()


def test_a_file_accepts_changes_and_fixes_the_schedule(tmp_path: Path) -> None:
    text = (
        f"{{max_duration: 2ep, batch_size: 8, seed: SEED, optimizer: {{type: SGD, lr: 0.1}}, schedule_total: 1ep, "
        f"schedule: {{type: LinearWithWarmup, num_warmup_steps: 0}}, checkpoints: {{folder: {tmp_path}}}"
    )

    def run(text: str) -> Fit:
        config = parse(text, RunConfig)
        return config.trainer(module=Slope(), train=ones(96), device="cpu").fit()

    first = run(text.replace("SEED", "1") + "}")
    assert weight(first) == pytest.approx(2 - 2 * math.prod(1 - 0.2 * (1 - step / 12) for step in range(12)))
    other = text.replace("SEED", "2")
    with pytest.raises(WrongCheckpoint, match="seed=1 in the checkpoint and 2"):
        run(other + "}")
    assert run(other + ", on_change: {seed: accept}}").resumed_step == 24
    with pytest.raises(ConfigError, match=r"on_change\.sed: unknown key; allowed: seed, shuffle.*did you mean seed"):
        run(other + ", on_change: {sed: accept}}")
    with pytest.raises(ConfigError, match=r"on_change\.seed: is 'akzept'"):
        run(other + ", on_change: {seed: akzept}}")


# Callbacks, early ends, old checkpoints


def test_a_callback_s_settings_are_those_of_the_code(twice: Twice) -> None:
    held_out = {"evaluate": Loader(ones(8), 8)}
    average = EMA(0.0, warm_up=False)
    _, end = twice({"callbacks": [EMA(0.9, warm_up=False)], **held_out}, {"callbacks": [average], **held_out})
    assert average.averages["w"].item() == pytest.approx(weight(end))  # a decay of 0 keeps nothing
    assert twice.lines() == ["decay of EMA: 0.9 → 0.0"]


def test_a_callback_that_is_gone_is_reported(twice: Twice) -> None:
    twice({"callbacks": [EMA()]}, {})
    assert twice.lines() == ["no callback of this run is called EMA, and its state is dropped"]


@pytest.mark.parametrize(("patience", "steps"), [(2, 16), (5, 24)])
def test_another_patience_counts_the_chances_that_brought_no_gain(patience: int, steps: int, twice: Twice) -> None:
    """The first evaluation is a gain; those at 8 and 12 bring none."""

    def stopping(patience: int) -> EarlyStopping:
        return EarlyStopping("val/loss", patience=patience, min_delta=10.0)

    options = {"evaluate": Loader(ones(8), 8), "evaluate_every": "4st"}
    _, end = twice({**options, "callbacks": [stopping(9)]}, {**options, "callbacks": [stopping(patience)]})
    assert end.state.step == steps
    key = "patience of EarlyStopping(min val/loss)"
    assert twice.lines()[0] == f"{key}: 9 → {patience}"


def test_a_run_that_was_stopped_early_says_that_it_stays_so(twice: Twice) -> None:
    class Enough(Callback):
        def on_epoch_end(self, fit: Fit) -> None:
            fit.stop("enough")

    _, end = twice({"callbacks": [Enough()]}, {})
    assert end.state.step == HALF
    assert "stopped early (enough), and stays so: resume from an earlier checkpoint" in twice.lines()[0]


def without(folder: Path, *keys: str) -> None:
    """Takes keys out of the state of a checkpoint, as if an older version had written it."""
    state = json.loads((folder / "state.json").read_text())
    body = json.dumps({key: value for key, value in state.items() if key not in keys}).encode()
    (folder / "state.json").write_bytes(body)
    manifest = json.loads((folder / "manifest.json").read_text())
    for entry in manifest["files"]:
        if entry["name"] == "state.json":
            entry.update(size=len(body), sha256=hashlib.sha256(body).hexdigest())
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("keys", [("settings",), ("settings", "about")])
def test_a_checkpoint_that_does_not_store_settings_is_resumed_from_as_before(
    keys: tuple[str, ...], twice: Twice, caplog: pytest.LogCaptureFixture
) -> None:
    made = {"schedule": lambda optimizer, totals: lr_scheduler.CosineAnnealingLR(optimizer, 48)}
    rates = Rates()
    trainer(checkpoints=twice.policy, max_duration="1ep", **made).fit()
    without(twice.policy.place() / "step-12", *keys)
    trainer(checkpoints=twice.policy, **made, optimizer=sgd(lr=0.02), callbacks=[rates]).fit()
    assert rates.seen == pytest.approx([cosine(step, 48) for step in range(12, 24)])
    (line,) = [record.getMessage() for record in caplog.records]
    assert "does not store the settings that it was made with" in line


# Several processes


def on_processes(folder: str) -> None:
    """A run in two halves, the second with other rates and another decay, in shards."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 2)

        def training_step(self, batch: list[Tensor]) -> Tensor:
            return (self.layer(batch[0][:, None]) - 2).square().mean()

    def run(rate: float, decay: float, place: Path, **options: Any) -> Fit:
        made = optimizer("SGD", lr=rate, weight_decay=decay, groups=[Group("layer.bias", {"lr": rate / 2})])
        settings = {"optimizer": made, "schedule": SCHEDULES["LambdaLR"], **options}
        return trainer(module=Net(), strategy="fsdp", checkpoints=Checkpoints(folder=place), **settings).fit()

    place, rates = Path(folder) / "checkpoints", Rates()
    run(0.02, 0.0, place, max_duration="3st")
    end = run(0.01, 0.5, place, callbacks=[rates], max_duration="5st")
    assert end.resumed_step == 3
    assert rates.seen == [pytest.approx([rate * (1 - step / 5) for rate in (0.01, 0.005)]) for step in (3, 4)]
    assert [group["weight_decay"] for group in end.optimizer.param_groups] == [0.5, 0.5]


def test_the_code_decides_where_parameters_are_sharded(tmp_path: Path, forks: Any) -> None:
    forks.succeed(on_processes, tmp_path, processes=2)
    said = (tmp_path / "rank-0.log").read_text()
    assert "lr of group 1 (layer.bias, ...): 0.01 → 0.005" in said and "weight_decay: 0.0 → 0.5" in said
    assert "changed since" not in (tmp_path / "rank-1.log").read_text()


def per_process(folder: str, on_change: dict[str, Any]) -> None:
    policy = Checkpoints(folder=Path(folder).parent / "checkpoints")
    batches = DataLoader(ones(96), batch_size=4)
    fit = trainer(train=batches, strategy="ddp", max_duration="9st", checkpoints=policy, on_change=on_change).fit()
    Path(folder, "resumed").write_text(str(fit.resumed_step))


def test_the_same_batch_per_process_on_more_processes_is_another_batch(tmp_path: Path, forks: Any) -> None:
    alone = {"train": DataLoader(ones(96), batch_size=4), "checkpoints": Checkpoints(folder=tmp_path / "checkpoints")}
    trainer(**alone, max_duration="5st").fit()
    codes = forks.run(per_process, tmp_path / "refused", processes=2, on_change={})
    assert any(codes)
    said = (tmp_path / "refused" / "rank-0.log").read_text()
    assert "which were 1 and are 2; on_change={'batch_size': 'scale'}" in said
    forks.succeed(per_process, tmp_path / "scaled", processes=2, on_change={"batch_size": "scale"})
    assert (tmp_path / "scaled" / "resumed").read_text() == "5"
