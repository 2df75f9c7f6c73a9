"""What the loop does, in which order, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchmetrics.aggregation import CatMetric, MeanMetric
from trainkit import Callback, Checkpoints
from trainkit.data import Loader
from trainkit.durations import Cadence, Epochs, Steps, Tokens, duration
from trainkit.errors import InvalidSetup, InvalidStep
from trainkit.loop.fit import Fit
from trainkit.state import State
from trainkit.trackers import JsonLines, RunContext
from trainkit.trainer import Totals

from libs.trainkit.tests.slope import Slope, Written, ones, trainer


class Recorded(Callback):
    """Notes the name of every hook."""

    def __init__(self) -> None:
        self.calls: list[str] = []


def _note(hook: str) -> Any:
    return lambda self, *arguments: self.calls.append(hook)


for _hook in (name for name in vars(Callback) if name.startswith("on_")):
    setattr(Recorded, _hook, _note(_hook))


def test_plain_training_follows_the_closed_form() -> None:
    fit = trainer().fit()

    assert fit.module.w.item() == pytest.approx(2 - 2 * 0.8**24)
    assert (fit.state.epoch, fit.state.step, fit.state.update, fit.state.samples) == (2, 24, 24, 192)
    assert fit.state.finished


@pytest.mark.parametrize(
    ("length", "steps"), [("2ep", 24), ("5st", 5), ("7up", 14), ("100sa", 14), (Steps(3), 3), ("1 epoch", 12)]
)
def test_a_run_is_as_long_as_its_duration_says(length: Any, steps: int) -> None:
    assert trainer(max_duration=length, accumulate=2).fit().state.step == steps


@pytest.mark.parametrize("text", ["2 hours", "0ep", "-1st", "ep3", "", "1.5ep"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(InvalidSetup, match="whole number"):
        duration(text)


@pytest.mark.parametrize("option", ["max_duration", "evaluate_every"])
def test_a_length_in_tokens_wants_steps_that_count_them(option: str) -> None:
    options = {"evaluate": Loader(ones(8), 8), option: "5tok"}
    with pytest.raises(InvalidStep, match=rf"{option} is counted in tokens.*return Loss\(sum, count\)"):
        trainer(**options).fit()


def test_durations_are_read_from_text() -> None:
    assert duration("1e9tok") == Tokens(10**9)
    assert duration("2eps") == duration("2 Epochs") == Epochs(2)


def test_a_cadence_keeps_its_rhythm_over_a_restart() -> None:
    state, due = State(step=7), []
    cadence = Cadence("5st", state)
    for state.step in range(8, 22):
        due += [state.step] if cadence.due(state) else []

    assert due == [10, 15, 20]


@pytest.mark.parametrize(("accumulate", "updates"), [(4, 3), (5, 3), (100, 1)])
def test_what_is_left_over_at_the_end_of_an_epoch_is_an_update_of_its_own(accumulate: int, updates: int) -> None:
    fit = trainer(accumulate=accumulate, max_duration="1ep").fit()

    assert fit.state.update == updates
    assert fit.module.w.item() == pytest.approx(2 - 2 * 0.8**updates)


def test_batches_of_any_iterable_weigh_the_same() -> None:
    def batches() -> Iterator[list[Tensor]]:
        for size in (8, 8, 8, 8, 2):
            yield [torch.ones(size)]

    class Endless:
        def __iter__(self) -> Iterator[list[Tensor]]:
            return batches()

    fit = trainer(train=Endless(), accumulate=2, max_duration="1ep").fit()

    assert fit.state.update == 3
    assert fit.module.w.item() == pytest.approx(2 - 2 * 0.8**3)


def test_hooks_are_called_in_the_order_that_the_documentation_gives() -> None:
    recorded = Recorded()
    trainer(
        callbacks=[recorded],
        train=Loader(ones(32), 8),
        max_duration="1ep",
        accumulate=2,
        evaluate=Loader(ones(8), 8),
        schedule=lambda optimizer, totals: torch.optim.lr_scheduler.StepLR(optimizer, totals.updates),
    ).fit()

    step = ["on_step_start", "on_forward_end", "on_backward_end"]
    update = ["on_update_start", "on_optimizer_end", "on_schedule_end", "on_clear_start", "on_update_end"]
    window = [*step, "on_step_end", *step, *update, "on_step_end"]
    evaluation = ["on_evaluation_start", "on_evaluation_step_start", "on_evaluation_step_end", "on_evaluation_end"]
    assert recorded.calls == [
        "on_fit_start",
        "on_epoch_start",
        *window,
        *window,
        *evaluation,
        "on_epoch_end",
        "on_epoch_done",
        "on_fit_end",
    ]


class Done(Callback):
    """Its state is the epochs that are done. It ends the run in the step after them, like a kill."""

    def __init__(self, ends: bool = False) -> None:
        self.done: list[int] = []
        self._ends = ends

    def on_epoch_done(self, fit: Fit) -> None:
        self.done.append(fit.state.epoch)
        fit.log({"done": fit.state.epoch})

    def on_step_start(self, fit: Fit, batch: Any) -> None:
        if self._ends and self.done:
            fit.flush_trackers()
            raise KeyboardInterrupt

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.done = list(state["done"])


def test_an_epoch_whose_checkpoint_was_made_is_done_in_the_resumed_run_too(tmp_path: Path) -> None:
    def run(callback: Done, **options: Any) -> None:
        policy = Checkpoints(folder=tmp_path, every="1ep")
        options |= {"checkpoints": policy, "trackers": [JsonLines()], "log_every": None}
        trainer(callbacks=[callback], **options).fit()

    with pytest.raises(KeyboardInterrupt):
        run(Done(ends=True))
    resumed = Done()
    run(resumed)

    assert resumed.done == [1, 2]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["done"]) for row in rows] == [(12, 1), (24, 2)]


def test_the_mean_loss_of_a_log_is_over_all_its_samples() -> None:
    written = Written()
    trainer(trackers=[written], log_every="1ep").fit()

    losses = [4 * 0.64**step for step in range(24)]
    assert written.rows == [
        (12, {"train/loss": pytest.approx(sum(losses[:12]) / 12, rel=1e-4)}),
        (24, {"train/loss": pytest.approx(sum(losses[12:]) / 12, rel=1e-4)}),
    ]
    assert written.outcome == "finished"


@pytest.mark.parametrize(
    ("every", "steps"), [("1ep", [12, 24]), ("5st", [5, 10, 15, 20, 24]), ("6st", [6, 12, 18, 24])]
)
def test_evaluation_is_due_at_any_cadence_and_not_twice(every: str, steps: list[int]) -> None:
    written = Written()
    trainer(evaluate=Loader(ones(32), 8), evaluate_every=every, trackers=[written], log_every=None).fit()

    assert [step for step, _ in written.rows] == steps


def test_the_loader_that_is_trained_on_can_be_evaluated_in_the_middle_of_an_epoch() -> None:
    class Order(Callback):
        def __init__(self) -> None:
            self.batches: list[list[float]] = []

        def on_step_start(self, fit: Fit, batch: Any) -> None:
            self.batches.append(batch[0].tolist())

    orders = [Order(), Order()]
    for order, evaluated in zip(orders, (False, True), strict=True):
        train = Loader(TensorDataset(torch.arange(20.0) / 20), 4)
        evaluate = {"evaluate": train, "evaluate_every": "2st"} if evaluated else {}
        trainer(train=train, max_duration="3ep", callbacks=[order], **evaluate).fit()

    assert orders[0].batches == orders[1].batches


def test_several_sets_are_evaluated_to_the_last_row() -> None:
    values = torch.arange(33.0)
    sets = {"a": Loader(TensorDataset(values), 8, shuffle=False), "b": Loader(ones(16), 8)}
    metrics = {"rows": CatMetric()}

    class Sum(CatMetric):
        def compute(self) -> Tensor:  # type: ignore[override]
            return torch.as_tensor(super().compute()).sum()

    metrics = {"rows": Sum()}
    fit = trainer(evaluate=sets, metrics=metrics).fit()

    w = fit.module.w.item()
    assert fit.results["a/rows"] == sum(range(33))
    assert fit.results["b/rows"] == 16
    assert fit.results["a/loss"] == pytest.approx(sum((w * x - 2) ** 2 for x in range(33)) / 33, rel=1e-5)


def test_batches_of_an_iterable_count_by_their_samples_in_an_evaluation() -> None:
    batches = [{"ids": ["a"] * len(rows), "rows": rows} for rows in torch.arange(10.0).split(4)]

    class Rows(Slope):
        def evaluation_step(self, batch: Any) -> dict[str, Any]:
            return {"loss": batch["rows"].mean()}

    assert trainer(module=Rows(), evaluate=batches).fit().results["val/loss"] == pytest.approx(4.5)


def test_evaluation_changes_no_mode_and_no_gradient() -> None:
    class Mixed(Slope):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Dropout(0.5)

        def training_step(self, batch: list[Tensor]) -> Tensor:
            modes.append((self.training, self.frozen.training, torch.is_grad_enabled()))
            loss: Tensor = super().training_step(batch)
            return loss

    class Freezing(Callback):
        def on_epoch_start(self, fit: Fit) -> None:
            fit.module.frozen.eval()

    modes: list[tuple[bool, bool, bool]] = []
    trainer(module=Mixed(), evaluate=Loader(ones(8), 8), callbacks=[Freezing()], train=Loader(ones(8), 8)).fit()

    assert [mode for mode, _ in groupby(modes)] == [(True, False, True), (False, False, False)] * 2


@pytest.mark.parametrize("per", ["update", "epoch"])
def test_a_schedule_steps_once_per_update_or_epoch(per: Any) -> None:
    told: list[Totals] = []

    def schedule(optimizer: torch.optim.Optimizer, totals: Totals) -> Any:
        told.append(totals)
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    fit = trainer(schedule=schedule, schedule_per=per, accumulate=5).fit()

    assert told == [Totals(updates=6, epochs=2, updates_per_epoch=3)]
    assert fit.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5 ** (6 if per == "update" else 2))


def test_a_callback_can_end_the_run_and_it_stays_ended() -> None:
    class Stopping(Callback):
        def on_evaluation_end(self, fit: Fit, results: Mapping[str, float]) -> None:
            if results["val/loss"] < 1:
                fit.stop("good enough")

    written = Written()
    fit = trainer(evaluate=Loader(ones(8), 8), evaluate_every="1st", callbacks=[Stopping()], trackers=[written]).fit()

    assert (fit.state.step, fit.stop_reason, written.outcome) == (4, "good enough", "stopped")


def test_an_error_is_told_and_raised_again() -> None:
    class Breaking(Callback):
        def on_update_end(self, fit: Fit) -> None:
            raise ValueError("mine")

    recorded, written = Recorded(), Written()
    with pytest.raises(ValueError, match="mine"):
        trainer(callbacks=[Breaking(), recorded], trackers=[written]).fit()

    assert recorded.calls[-1] == "on_error"
    assert written.outcome == "failed"


class Moody(Written):
    """Takes the rows of some steps alone, cannot say that they are safe, and cannot be closed."""

    def log(self, values: Mapping[str, float | Tensor], step: int) -> None:
        if 4 <= step < 10:
            raise ConnectionError("nobody there")
        super().log(values, step)

    def flush(self) -> None:
        raise OSError("disk full")

    def close(self, outcome: str) -> None:
        super().close(outcome)
        raise OSError("cannot be closed")


def test_a_tracker_that_raises_loses_its_rows_alone_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before, moody, behind = Written(), Moody(), Written()
    policy = Checkpoints(folder=tmp_path, every="4st")
    options: dict[str, Any] = {"log_every": "2st", "checkpoints": policy}

    fit = trainer(trackers=[before, moody, behind], **options).fit()

    assert fit.state.finished and (tmp_path / "step-24").is_dir()
    assert [step for step, _ in before.rows] == list(range(2, 25, 2))
    assert behind.rows == before.rows
    assert moody.rows == [row for row in before.rows if not 4 <= row[0] < 10]
    assert [each.outcome for each in (before, moody, behind)] == ["finished"] * 3
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    refused, unsafe, unclosed, lost = said
    assert refused.startswith("the tracker Moody did not take its row of step 4: ConnectionError: nobody there.")
    assert "trainkit.trackers.Background" in refused
    assert unsafe.startswith("the tracker Moody could not make its rows safe for a checkpoint")
    assert unclosed.startswith("the tracker Moody could not be closed")
    assert lost == "the tracker Moody lost 3 row(s), of steps 4 to 8: they are missing from its series"


def test_a_tracker_that_cannot_be_opened_ends_the_run_before_its_first_step() -> None:
    class Unopenable(Written):
        def open(self, context: RunContext) -> None:
            raise OSError("no such place")

    written, recorded = Written(), Recorded()
    with pytest.raises(OSError, match="no such place"):
        trainer(trackers=[written, Unopenable()], callbacks=[recorded]).fit()

    assert written.outcome == "failed"
    assert "on_step_start" not in recorded.calls


def test_what_fails_while_an_error_is_told_hides_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Breaking(Callback):
        def on_update_end(self, fit: Fit) -> None:
            raise ValueError("mine")

        def on_error(self, fit: Fit, error: BaseException) -> None:
            raise OSError("of the hook")

    class Unclosable(Written):
        def close(self, outcome: str) -> None:
            raise OSError("of the tracker")

    recorded, written = Recorded(), Written()
    with pytest.raises(ValueError, match="mine"):
        trainer(callbacks=[Breaking(), recorded], trackers=[written, Unclosable()]).fit()

    assert recorded.calls[-1] == "on_error"
    assert written.outcome == "failed"
    assert "of the hook" in caplog.text and "of the tracker" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"module": nn.Linear(1, 1)}, "Linear has no training_step"),
        ({"accumulate": 0}, "accumulate"),
        ({"clip_norm": 0.0}, "clip_norm"),
        ({"strategy": "dpp"}, "choose one of auto, single, ddp, fsdp"),
        ({"precision": "fp8"}, "choose one of fp32"),
        ({"callbacks": [Recorded(), Recorded()]}, "two callbacks are called 'Recorded'"),
        ({"recompute": [nn.Linear]}, "no such submodule"),
        ({"train": []}, "no batch"),
        ({"schedule_per": "updates"}, "schedule_per='updates': choose one of update, epoch"),
        ({"non_finite": "rais"}, "non_finite='rais': choose one of raise, skip, ignore"),
        ({"out_of_memory": "cut"}, "choose one of raise, retry, split"),
        (
            {"module": nn.Linear},
            r"module=Linear .* without arguments .*'in_features'.*: give partial\(Linear, \.\.\.\)",
        ),
        ({"module": nn.Identity}, "Identity has no training_step"),
        ({"accumulate": "4"}, "accumulate has to be a whole number of at least 1, not '4'"),
        ({"clip_norm": "1"}, "clip_norm has to be a number greater than 0, not '1'"),
        ({"seed": 1.5}, "seed has to be a whole number"),
        ({"schedule": "cosine"}, "schedule is a str: give what makes one"),
        ({"train": 5}, "train is a int: give a trainkit.data.Loader, or any iterable of batches"),
        ({"evaluate": {"held out": 5}}, r"evaluate\['held out'\] is a int"),
        ({"callbacks": [Recorded]}, r"callbacks\[0\] is a class \(Recorded\), not an instance"),
        ({"callbacks": Recorded()}, "callbacks is a Recorded: give a list"),
        ({"trackers": ["tensorboard"]}, r"trackers\[0\] is a str: give a trainkit.Tracker"),
        ({"metrics": [MeanMetric()]}, "metrics is a list: give them by the names"),
        ({"checkpoints": "here"}, "checkpoints is a str: give trainkit.Checkpoints"),
        ({"log_every": 10}, "log_every: 10 is not a duration"),
        ({"max_duration": 3}, "max_duration: 3 is not a duration"),
        ({"optimizer": torch.optim.SGD([torch.zeros(1)])}, "optimizer is a SGD: give what makes one"),
        ({"max_duration": "2ev"}, "would never be reached"),
        ({"max_duration": "1e400st"}, "too large"),
        ({"max_duration": "5tok", "schedule": lambda o, t: None}, "with a schedule"),
    ],
)
def test_parts_that_cannot_work_are_refused_with_a_way_out(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSetup, match=message):
        trainer(**options).fit()


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (torch.ones(3), r"shape \(3,\)"),
        (1.0, "a float"),
        ({"los": 1}, "without 'loss'; it has 'los'"),
        (None, "NoneType"),
    ],
)
def test_a_step_that_returns_no_loss_is_told_what_to_return(output: Any, message: str) -> None:
    class Wrong(Slope):
        def training_step(self, batch: Any) -> Any:
            return output

    with pytest.raises(InvalidStep, match=message):
        trainer(module=Wrong()).fit()


def test_a_metric_that_gets_nothing_is_named() -> None:
    with pytest.raises(InvalidStep, match="'hits' on 'val'"):
        trainer(evaluate=Loader(ones(8), 8), metrics={"hits": MeanMetric()}).fit()
