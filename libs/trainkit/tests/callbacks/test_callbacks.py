"""Callbacks in real runs of a model with one weight: w starts at 0, the loss is (w - 2)^2, the rate 0.1.

After n updates w = 2 - 2 * 0.8^n.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from trainkit.callbacks import EMA, Callback, EarlyStopping, KeepBest, Monitor, Progress, WatchGradients, load_weights
from trainkit.checkpoints import Checkpoints
from trainkit.data import Loader
from trainkit.errors import InvalidSetup, NonFiniteLoss
from trainkit.loop.fit import Fit
from trainkit.metrics import Rule, Term
from trainkit.optim import optimizer, schedule
from trainkit.trackers import RunContext, Tracker
from trainkit.trackers.base import Outcome
from trainkit.trainer import Trainer


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def training_step(self, batch: Any) -> Tensor:
        return ((self.w * batch[0] - 2) ** 2).mean()


class Rows(Tracker):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def open(self, context: RunContext) -> None:
        pass

    def log(self, values: Mapping[str, float | Tensor], step: int) -> None:
        self.rows.append((step, {name: float(value) for name, value in values.items()}))

    def close(self, outcome: Outcome) -> None:
        pass

    def series(self, name: str) -> list[tuple[int, float]]:
        return [(step, values[name]) for step, values in self.rows if name in values]


class Scored(Line):
    def evaluation_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": self.training_step(batch), "score": batch[0]}


class Given:
    """A metric that computes these values, one for each set that is evaluated."""

    def __init__(self, *values: float) -> None:
        self._values = iter(values)

    def update(self, *values: Any) -> None:
        pass

    def compute(self) -> float:
        return next(self._values)

    def reset(self) -> None:
        pass

    def to(self, device: torch.device) -> Any:
        return self


class Interrupt(Callback):
    """Ends a run in the middle as a failure would."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, fit: Fit, loss: Tensor) -> None:
        if fit.state.step == self._step:
            raise RuntimeError("the power went")


ONES = TensorDataset(torch.ones(96, 1))


def trainer(*callbacks: Callback, **parts: Any) -> Trainer:
    settings: dict[str, Any] = {
        "module": Line(),
        "optimizer": optimizer("SGD", lr=0.1),
        "train": Loader(ONES, 8),
        "evaluate": Loader(ONES, 32, shuffle=False),
        "max_duration": "2ep",
        "callbacks": callbacks,
        "device": "cpu",
    }
    return Trainer(**{**settings, **parts})


def scored(values: list[float], *callbacks: Callback, **parts: Any) -> Fit:
    """A run with an evaluation at every step, with these results for `val/score`."""
    parts |= {"module": Scored(), "metrics": {"score": Given(*values)}, "evaluate_every": "1st"}
    return trainer(*callbacks, max_duration=f"{len(values)}st", **parts).fit()


@pytest.mark.spec("AC-072")
def test_a_run_stops_when_the_patience_is_over_and_says_by_which_rule() -> None:
    left = []

    class Watch(Callback):
        def on_step_end(self, fit: Fit, loss: Tensor) -> None:
            left.append(stopping.record.left)

        def on_fit_end(self, fit: Fit) -> None:
            left.append(stopping.record.left)

    stopping = EarlyStopping("val/score", patience=2)
    fit = scored([1.0, 0.9, 0.95, 0.96, 0.5], stopping, Watch())
    assert fit.state.evaluations == 4
    assert fit.stop_reason == "2 evaluations without a gain: min val/score"
    assert left[1:] == [2, 2, 1, 0]


def test_greater_can_be_better_and_a_small_gain_is_none() -> None:
    assert scored([0.1, 0.2, 0.3, 0.4], EarlyStopping("val/score", mode="max", patience=1)).state.step == 4
    assert scored([0.1, 0.2, 0.3, 0.4], EarlyStopping("val/score", patience=1)).state.step == 2
    fit = scored([0.1, 0.2, 0.3, 0.4], EarlyStopping("val/score", mode="max", patience=1, min_delta=0.15))
    assert fit.state.step == 2


@pytest.mark.parametrize("make", [EarlyStopping, lambda name: KeepBest(name, "best")])
def test_a_misspelled_result_is_told_before_the_first_step(make: Any) -> None:
    model = Line()
    with pytest.raises(
        InvalidSetup, match=r"no result is called 'val/los'; there will be: val/loss; did you mean val/loss\?"
    ):
        trainer(make("val/los"), module=model).fit()
    with pytest.raises(InvalidSetup, match="nothing is evaluated, so there will be no result 'val/loss'"):
        trainer(make("val/loss"), module=model, evaluate=None).fit()
    assert model.w.item() == 0.0


def test_a_result_that_a_metric_names_itself_is_told_when_there_is_none() -> None:
    with pytest.raises(InvalidSetup, match=r"no result is called 'val/score/f1'; there are: val/score, val/loss"):
        scored([1.0], EarlyStopping("val/score/f1"))


def test_a_trainer_that_runs_twice_begins_anew(tmp_path: Path) -> None:
    rows = Rows()
    callbacks = [
        Monitor("10st"),
        EarlyStopping(patience=1, min_delta=0.01),
        EMA(0.9),
        KeepBest(folder=tmp_path / "best"),
    ]
    twice = trainer(*callbacks, trackers=[rows])
    runs = []
    for _ in range(2):
        with torch.no_grad():
            twice.module.w.zero_()
        rows.rows.clear()
        fit = twice.fit()
        kept = json.loads((tmp_path / "best" / "best.json").read_text())["step"]
        runs.append((fit.state.step, fit.results, rows.series("lr"), kept, callbacks[2].averages["w"].item()))
    assert runs[0] == runs[1]
    assert [step for step, _ in runs[0][2]] == [10, 20]


def test_patience_goes_on_after_a_restart(tmp_path: Path) -> None:
    policy = Checkpoints(folder=tmp_path, every="1st")
    with pytest.raises(RuntimeError, match="the power went"):
        scored([1.0, 2.0, 2.0, 2.0], EarlyStopping("val/score"), Interrupt(3), checkpoints=policy)
    fit = scored([1.0, 2.0, 2.0, 2.0, 2.0], EarlyStopping("val/score"), checkpoints=policy)
    assert fit.resumed_step == 2
    assert fit.state.step == 4


class Saved(Callback):
    """Which evaluations made `KeepBest` save, by what is in the folder."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.steps = folder, []

    def on_evaluation_end(self, fit: Fit, results: Any) -> None:
        best = self._folder / "best.json"
        if best.exists() and json.loads(best.read_text())["step"] == fit.state.step:
            self.steps.append(fit.state.step)

    steps: list[int]


@pytest.mark.spec("AC-067")
@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (Rule.of("a/accuracy", "b/accuracy", mode="max"), [1, 3]),
        (Rule.of("a/accuracy", mode="max"), [1, 2]),
        (Rule((Term(("a/accuracy",), "max"), Term(("b/accuracy",), "max"))), [1, 3]),
    ],
    ids=["mean", "one set", "none worse"],
)
def test_the_best_weights_are_saved_by_rule(rule: Rule, expected: list[int], tmp_path: Path) -> None:
    class Model(Line):
        def evaluation_step(self, batch: Any) -> dict[str, Any]:
            return {"accuracy": batch[0]}

    saved = Saved(tmp_path / "best")
    keep = KeepBest(rule, tmp_path / "best")
    sets = {name: Loader(ONES, 32, shuffle=False) for name in ("a", "b")}
    accuracy = Given(0.6, 0.8, 0.7, 0.6, 0.7, 0.9)
    parts = {"module": Model(), "evaluate": sets, "metrics": {"accuracy": accuracy}}
    trainer(keep, saved, max_duration="3st", evaluate_every="1st", **parts).fit()
    assert saved.steps == expected
    w = load_weights(tmp_path / "best")["w"].item()
    assert w == pytest.approx(2 - 2 * 0.8 ** expected[-1])


@pytest.mark.spec("AC-068")
def test_nothing_is_saved_before_the_bound_is_met(tmp_path: Path) -> None:
    saved = Saved(tmp_path / "best")
    trainer(KeepBest(Rule.of("val/loss", below=0.01), tmp_path / "best"), saved).fit()
    assert saved.steps == [24]
    best = json.loads((tmp_path / "best" / "best.json").read_text())
    assert best["values"] == pytest.approx([8.92e-5], rel=1e-2)
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


def test_what_is_not_a_number_is_never_best_and_the_folder_is_beside_the_checkpoints(tmp_path: Path) -> None:
    keep = KeepBest("val/score", mode="max")
    scored([float("nan"), 0.5, float("nan"), 0.4], keep, checkpoints=Checkpoints(folder=tmp_path, every=None))
    assert (keep.record.best, keep.record.best_step) == ([0.5], 2)
    assert load_weights(tmp_path / "best")["w"].item() == pytest.approx(0.72)


def test_bounds_that_nothing_meets_and_bounds_of_several_terms_are_refused() -> None:
    with pytest.raises(InvalidSetup, match=r"nothing is above 0\.9 and below 0\.8"):
        Rule.of("val/accuracy", above=0.9, below=0.8)
    with pytest.raises(InvalidSetup, match="exactly one term"):
        Rule((Term(("a",)), Term(("b",))), below=1.0)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 64)
        self.middle = nn.Linear(64, 64)
        self.head = nn.Linear(64, 1000, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.middle(self.embedding(tokens)))
        return logits

    def training_step(self, batch: Any) -> Tensor:
        return self(batch[0].long()).mean()


@pytest.mark.spec("AC-071")
def test_tied_weights_are_stored_once_and_read_back_tied(tmp_path: Path) -> None:
    model = Tied()
    trainer(KeepBest("val/loss", tmp_path / "best"), module=model, max_duration="1st").fit()
    again = Tied()
    again.load_state_dict(load_weights(tmp_path / "best"))
    tokens = torch.arange(10)
    assert torch.equal(again(tokens), model(tokens))
    assert (tmp_path / "best" / "model.safetensors").stat().st_size < 1.1 * 4 * (64 * 1000 + 65 * 64)


@pytest.mark.spec("AC-070")
def test_large_weights_are_divided_into_files_with_an_index(tmp_path: Path) -> None:
    model = Line()
    model.layers = nn.ModuleList(nn.Linear(2000, 1000, bias=False) for _ in range(6))  # 48 MB
    keep = KeepBest("val/loss", tmp_path / "best", max_shard_bytes=10_000_000)
    trainer(keep, module=model, max_duration="1st").fit()
    files = sorted(path.name for path in (tmp_path / "best").glob("*.safetensors"))
    assert len(files) >= 5 and (tmp_path / "best" / "model.safetensors.index.json").exists()
    weights = load_weights(tmp_path / "best")
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())


def averages_by_hand(updates: int, decay: Callable[[int], float]) -> float:
    average = 0.0
    for n in range(1, updates + 1):
        average += (1 - decay(n)) * ((2 - 2 * 0.8**n) - average)
    return average


def test_the_average_is_that_of_the_formula() -> None:
    ema = EMA(0.9, warm_up=False)
    trainer(ema).fit()
    assert ema.averages["w"].item() == pytest.approx(averages_by_hand(24, lambda n: 0.9), rel=1e-5)
    ema = EMA(0.9)
    trainer(ema).fit()
    expected = averages_by_hand(24, lambda n: min(0.9, (1 + n) / (10 + n)))
    assert ema.averages["w"].item() == pytest.approx(expected, rel=1e-5)


class Halves(nn.Module):
    """Weights in 16 bits, and complex ones."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.c = nn.Parameter(torch.ones(2, dtype=torch.complex64))

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return self.w.float().square().sum() + self.c.abs().square().sum()


def test_an_average_of_weights_in_16_bits_is_kept_in_32_also_over_evaluations() -> None:
    class Steps(Callback):
        def __init__(self) -> None:
            self.averages: dict[str, Tensor] = {}

        def on_fit_start(self, fit: Fit) -> None:
            self.averages = {name: p.detach().clone().cfloat() for name, p in fit.module.named_parameters()}

        def on_update_end(self, fit: Fit) -> None:
            for name, p in fit.module.named_parameters():
                self.averages[name] = self.averages[name] * 0.999 + p.detach().cfloat() * 0.001

    ema, steps = EMA(0.999, warm_up=False), Steps()
    fit = trainer(ema, steps, module=Halves(), optimizer=partial(torch.optim.SGD, lr=0.01), evaluate_every="3st").fit()

    for name, average in steps.averages.items():
        assert torch.allclose(ema.averages[name].cfloat(), average.cfloat(), rtol=1e-5, atol=1e-6), name
    assert ema.averages["w"].dtype == torch.float32 and fit.module.w.dtype == torch.bfloat16
    assert not torch.equal(fit.module.w.float(), ema.averages["w"])


def test_evaluations_see_the_average_and_training_does_not(tmp_path: Path) -> None:
    ema = EMA(0.9, warm_up=False)
    fit = trainer(KeepBest("val/loss", tmp_path / "best"), ema).fit()
    average = ema.averages["w"].item()
    assert fit.results["val/loss"] == pytest.approx((average - 2) ** 2, rel=1e-5)
    assert load_weights(tmp_path / "best")["w"].item() == average
    assert fit.module.w.item() == pytest.approx(2 - 2 * 0.8**24)


def test_the_average_of_a_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    whole, resumed = EMA(0.9), EMA(0.9)
    trainer(whole).fit()
    policy = Checkpoints(folder=tmp_path, every="5st")
    with pytest.raises(RuntimeError, match="the power went"):
        trainer(EMA(0.9), Interrupt(17), checkpoints=policy).fit()
    fit = trainer(resumed, checkpoints=policy).fit()
    assert fit.resumed_step == 15
    assert torch.equal(whole.averages["w"], resumed.averages["w"])


def test_an_average_that_is_new_in_a_resumed_run_begins_with_its_weights(tmp_path: Path) -> None:
    policy, ema = Checkpoints(folder=tmp_path, every="5st"), EMA(0.9)
    half = trainer(checkpoints=policy, max_duration="1ep").fit().module.w.item()

    trainer(ema, checkpoints=policy, max_duration="13st").fit()

    now = 2 - 2 * 0.8**13
    assert half == pytest.approx(2 - 2 * 0.8**12)
    assert ema.averages["w"].item() == pytest.approx(half + (now - half) * (1 - 2 / 11), rel=1e-5)


@pytest.mark.spec("AC-050")
def test_the_monitor_logs_the_rate_of_every_step() -> None:
    rows = Rows()
    parts = {"schedule": schedule("StepLR", per="epoch", step_size=1, gamma=0.5), "schedule_per": "epoch"}
    trainer(Monitor("1st", throughput=False, memory=False, grad_norm=False), trackers=[rows], **parts).fit()
    assert rows.series("lr") == [(step, 0.1 if step <= 12 else 0.05) for step in range(1, 25)]


@pytest.mark.spec("AC-053")
def test_the_monitor_logs_the_norm_before_clipping() -> None:
    for parts in ({}, {"clip_norm": 1.0}):
        rows = Rows()
        trainer(Monitor("1st"), trackers=[rows], **parts).fit()
        assert rows.series("grad_norm")[0] == (1, pytest.approx(4.0))


def test_the_monitor_logs_speed_memory_and_load_at_its_pace() -> None:
    rows = Rows()
    trainer(Monitor("10st", utilisation=True, counters=True), trackers=[rows]).fit()
    for name in ("throughput/steps_per_s", "throughput/samples_per_s", "memory/process_gb", "epoch"):
        assert [step for step, _ in rows.series(name)] == [10, 20]
    rates = [rows.series(f"throughput/{unit}_per_s")[0][1] for unit in ("samples", "steps")]
    assert rates[0] == pytest.approx(8 * rates[1])
    assert all(value >= 0 for _, value in rows.series("utilisation/cpu_percent"))


def test_parameter_groups_with_rates_of_their_own_have_a_series_each() -> None:
    rows = Rows()
    model = Line()
    model.other = nn.Parameter(torch.zeros(1))
    from trainkit.optim import Group

    made = optimizer("SGD", lr=0.1, groups=[Group("other", {"lr": 0.5})])
    trainer(Monitor("24st"), module=model, optimizer=made, trackers=[rows], max_duration="24st").fit()
    assert (rows.series("lr/0"), rows.series("lr/1")) == ([(24, 0.1)], [(24, 0.5)])


def test_the_bar_shows_steps_results_and_why_a_run_stopped() -> None:
    text = io.StringIO()
    trainer(Progress(text, interval_s=0), EarlyStopping("val/loss", patience=1, min_delta=1.0)).fit()
    shown = text.getvalue()
    assert "24/24" in shown and "step 12: val/loss 0.01889" in shown and "loss=" in shown
    assert "stopped: 1 evaluations without a gain: min val/loss" in shown


def test_the_bar_knows_the_length_of_a_run_however_it_is_given() -> None:
    for duration, total in (("24st", 24), ("2ep", 24), ("16up", 16), ("64sa", 8)):
        text = io.StringIO()
        trainer(Progress(text, interval_s=0), max_duration=duration).fit()
        assert f"{total}/{total}" in text.getvalue()


def test_the_bar_is_closed_when_a_run_fails() -> None:
    text = io.StringIO()
    with pytest.raises(RuntimeError):
        trainer(Progress(text, interval_s=0), Interrupt(5)).fit()
    assert "stopped: RuntimeError: the power went" in text.getvalue()


class Explodes(Line):
    def __init__(self) -> None:
        super().__init__()
        self.fine = nn.Parameter(torch.ones(1))
        self.steps = 0

    def training_step(self, batch: Any) -> Tensor:
        self.steps += 1
        return (self.w * (float("inf") if self.steps == 4 else 1.0)).sum() + self.fine.sum()


def test_the_watch_names_the_parameter_whose_gradient_is_not_finite() -> None:
    with pytest.raises(NonFiniteLoss, match=r"update 4: the gradient is not finite on process 0 in w$"):
        trainer(WatchGradients(every=1), module=Explodes(), log_every=None, evaluate=None).fit()


def test_the_watch_logs_norms_by_parameter() -> None:
    rows = Rows()
    trainer(WatchGradients(every=1, log_norms=True), trackers=[rows], max_duration="1st").fit()
    assert rows.series("grad_norm/w") == [(0, pytest.approx(4.0))]


def test_settings_out_of_bounds_are_refused() -> None:
    for make in (lambda: EMA(1.0), lambda: EMA(every=0), lambda: WatchGradients(0), lambda: EarlyStopping(patience=0)):
        with pytest.raises(InvalidSetup):
            make()
    with pytest.raises(InvalidSetup, match="mode='maximum': choose min or max"):
        EarlyStopping("val/accuracy", mode="maximum")  # type: ignore[arg-type]


def test_importing_costs_nothing_that_is_not_used() -> None:
    program = """
import sys, torch
import trainkit.callbacks.ema, trainkit.callbacks.gradients, trainkit.callbacks.monitor, trainkit.callbacks.progress
import trainkit.callbacks.selection, trainkit.huggingface, trainkit.metrics, trainkit.optim, trainkit.search.space
import trainkit.trackers.files, trainkit.trackers.mlflow, trainkit.trackers.tensorboard, trainkit.trackers.yard
heavy = "mlflow optuna tensorboard torch.distributed.tensor torchmetrics trainyard transformers"
print(*(name for name in heavy.split() if name in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
