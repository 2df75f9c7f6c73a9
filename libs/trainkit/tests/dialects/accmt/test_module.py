"""The user's module, and the state that it reads."""

from __future__ import annotations

import contextlib
import json
import math
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from trainkit.callbacks.weights import load_weights
from trainkit.dialects.accmt import AcceleratorModule
from trainkit.errors import InvalidSetup

from libs.trainkit.tests.dialects.accmt.bowl import (
    Bowl,
    Layers,
    Noted,
    Rows,
    Swaps,
    bowls,
    fitted,
    hps,
    logged,
    trainer,
)

# The module returns the values of a metric that most runs here do not have.
pytestmark = pytest.mark.filterwarnings("ignore:validation_step returned")


class Distilled(Bowl):
    """Learns the answers of its teacher, which are 2 for every sample as long as the teacher does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1), nn.Dropout(0.5))
        self.teacher[0].weight.data.fill_(1.5)
        self.teacher[0].bias.data.fill_(0.5)
        self.answers: list[Tensor] = []

    def training_step(self, batch: Any) -> Tensor:
        assert self.teacher is not None
        self.answers.append(self.teacher(batch[0][:, None]))
        return ((self(batch[0]) - self.answers[-1][:, 0]) ** 2).mean()


@pytest.mark.spec("AC-073")
def test_a_teacher_answers_and_is_neither_trained_nor_saved(tmp_path: Path) -> None:
    given: list[str] = []

    class Watch(Noted):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            given[:] = [name for group in optimizer.param_groups for name in group["param_names"]]

    module = Distilled()
    before = {name: value.clone() for name, value in module.teacher.state_dict().items()}
    fitted(tmp_path, module=module, callback=Watch())
    # The teacher's normalization has seen no data: in evaluation mode it changes nothing.
    torch.testing.assert_close(torch.stack(module.answers), torch.full((24, 8, 1), 2.0))
    assert not any(each.requires_grad for each in module.answers)
    assert module.w == pytest.approx(1.990555, abs=1e-5)
    after = module.teacher.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(each.grad is None for each in module.teacher.parameters())
    assert given == ["model.w"] and set(load_weights(tmp_path / "best_valid_loss")) == {"w"}


@pytest.mark.spec("AC-073")
def test_the_teacher_is_moved_to_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A device that is not the CPU and that every machine has: its tensors have shapes and no values.
    monkeypatch.setattr("trainkit.strategies.base.chosen", lambda device, local_rank: torch.device("meta"))
    module = Distilled()
    options: dict[str, Any] = {"enable_checkpointing": False, "disable_model_saving": True, "safe_steps": False}
    with contextlib.suppress(RuntimeError, NotImplementedError):  # the run ends where it needs values
        fitted(tmp_path, hps(max_steps=1), module=module, val=None, log_every=None, **options)
    assert [each.device.type for each in module.answers] == ["meta"]


@pytest.mark.spec("AC-073")
def test_the_teacher_computes_in_the_precision_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINKIT_STRATEGY", "single-bf16")
    module = Distilled()
    fitted(tmp_path, hps(max_steps=1), module=module, val=None, enable_checkpointing=False)
    assert [each.dtype for each in module.answers] == [torch.bfloat16]


@pytest.mark.spec("AC-073")
@pytest.mark.spec("AC-076")
@pytest.mark.spec("AC-077")
def test_a_module_without_a_part_is_refused_before_training(tmp_path: Path) -> None:
    class Empty(AcceleratorModule):
        pass

    class Model(Empty):
        def __init__(self) -> None:
            self.model = nn.Linear(3, 2)

    class Trains(Model):
        def training_step(self, batch: Any) -> Tensor:
            return self.model(torch.ones(3)).sum()

    for module, part in ((Empty(), "Empty has no model"), (Model(), "Model has no training_step")):
        with pytest.raises(Exception, match=part) as refused:
            trainer(tmp_path / "run").fit(module, bowls(8))
        assert refused.type is InvalidSetup
    with pytest.raises(Exception, match="Trains has no validation_step") as refused:
        trainer(tmp_path / "run").fit(Trains(), bowls(8), bowls(8))
    assert refused.type is InvalidSetup and not (tmp_path / "run").exists()


@pytest.mark.spec("AC-078")
@pytest.mark.spec("AC-079")
def test_only_what_is_not_frozen_in_the_model_is_trained(tmp_path: Path) -> None:
    class Counted(torch.optim.SGD):
        steps = 0

        def step(self, closure: Any = None) -> Any:
            Counted.steps += 1
            return super().step(closure)

    class Partly(Bowl):
        def __init__(self) -> None:
            super().__init__()
            self.model.fixed = nn.Linear(1, 1)
            self.freeze(self.model.fixed)

        def forward(self, x: Tensor) -> Tensor:
            return self.model(x) + 0 * self.model.fixed(x[:, None])[:, 0]

    class Own(Partly):
        def get_optimizer(self) -> Any:
            return Counted([("w", self.model.w)], lr=0.1)

    class Schedule(Bowl):
        def get_optimizer(self) -> Any:
            return torch.optim.lr_scheduler.StepLR(torch.optim.SGD([self.model.w]), 1)

    noted, module = Noted(), Partly()
    before = [each.clone() for each in module.model.fixed.parameters()]
    assert not any(each.requires_grad for each in module.model.fixed.parameters())
    # A weight decay would move a weight whose gradient is zero.
    numbers = hps(optim_kwargs={"lr": 0.1, "weight_decay": 0.1})
    fitted(tmp_path / "frozen", numbers, module=module, callback=noted)
    after = list(module.model.fixed.parameters())
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    groups = noted.given["on_after_optimizer_step"][0][0].param_groups
    assert [name for group in groups for name in group["param_names"]] == ["model.w"]
    assert set(load_weights(tmp_path / "frozen" / "best_valid_loss")) == {"w", "fixed.weight", "fixed.bias"}
    module.unfreeze(module.model.fixed)
    assert all(each.requires_grad for each in module.model.fixed.parameters())

    module = Own()
    fitted(tmp_path / "own", hps(optim_kwargs={"lr": 0.7}), module=module)
    assert Counted.steps == 24 and module.w == pytest.approx(1.990555, abs=1e-5)
    with pytest.raises(Exception, match="get_optimizer has to return a torch optimizer, not a StepLR") as refused:
        fitted(tmp_path / "wrong", module=Schedule())
    assert refused.type is TypeError


@pytest.mark.spec("AC-078")
@pytest.mark.parametrize("clears", ["to none", "to zeros"])
def test_parts_are_frozen_and_unfrozen_during_a_run(tmp_path: Path, clears: str) -> None:
    weights, momenta, decay = [0.0, 0.0], [0.0, 0.0], 0.2
    for step in range(6):
        gradient = 2 * (sum(weights) - 2)
        for at in ((0,), (0, 1), (1,))[step // 2]:
            momenta[at] = 0.9 * momenta[at] + gradient + decay * weights[at]
        weights = [
            w - 0.1 * momenta[at] if at in ((0,), (0, 1), (1,))[step // 2] else w for at, w in enumerate(weights)
        ]
    numbers: dict[str, Any] = {"epochs": 3, "optim_kwargs": {"lr": 0.1, "momentum": 0.9, "weight_decay": decay}}
    options: dict[str, Any] = {"train": bowls(16), "val": None, "set_to_none": clears == "to none"}
    _, module = fitted(tmp_path / "whole", hps(**numbers), module=Layers(), callback=Swaps(), **options)
    assert module.weights == pytest.approx(weights)
    # A run that is resumed trains what the first one trained.
    options["checkpoint_every"] = "1st"
    for steps in (3, 5, 6):
        resumed = Layers()
        fitted(tmp_path / "cut", hps(**numbers, max_steps=steps), module=resumed, callback=Swaps(), **options)
    assert resumed.weights == module.weights


def test_an_unfrozen_part_needs_an_optimizer_of_one_group(tmp_path: Path) -> None:
    class Groups(Layers):
        def get_optimizer(self) -> Any:
            groups = [{"params": [self.model["early"].w]}, {"params": [nn.Parameter(torch.zeros(1))]}]
            return torch.optim.SGD(groups, lr=0.1)

    with pytest.raises(InvalidSetup, match=r"late\.w was unfrozen during the run, and the optimizer has 2 groups"):
        fitted(tmp_path, module=Groups(), train=bowls(8), val=None, callback=Swaps())


@pytest.mark.spec("AC-074")
@pytest.mark.spec("AC-075")
def test_a_module_calls_its_model_and_counts_its_parameters() -> None:
    module = AcceleratorModule()
    module.model = nn.Linear(3, 2)
    x = torch.randn(4, 3)
    assert torch.equal(module(x), module.model(x)) and len(module) == 8
    module.freeze(module.model)
    module.teacher = nn.Linear(5, 5)
    assert len(module) == 8
    module.model = nn.Identity()
    assert len(module) == 0 and bool(module)

    class Times(nn.Module):
        def forward(self, x: Tensor, times: float = 1.0) -> Tensor:
            return x * times

    class Doubled(AcceleratorModule):
        def forward(self, x: Tensor, times: float) -> Tensor:
            return 2 * self.model(x, times=times)

    for kind, expected in ((AcceleratorModule, 3 * x), (Doubled, 6 * x)):
        module = kind()
        module.model = Times()
        assert torch.equal(module(x, times=3.0), expected)


@pytest.mark.spec("AC-076")
def test_the_loss_that_a_step_returns_is_minimized(tmp_path: Path) -> None:
    class Given(Bowl):
        def __init__(self) -> None:
            super().__init__()
            self.batches: list[tuple[int, ...]] = []

        def training_step(self, batch: Any) -> Tensor:
            self.batches.append((len(batch), *batch[0].shape))
            return super().training_step(batch)

    _, module = fitted(tmp_path, hps(max_steps=2), module=Given(), val=None)
    assert module.batches == [(2, 8)] * 2 and module.w == pytest.approx(0.72)


STATE: dict[str, Any] = {
    "global_step": 0,
    "train_step": 0,
    "val_step": 0,
    "epoch": 0,
    "is_end_of_epoch": False,
    "is_last_training_batch": False,
    "is_last_validation_batch": False,
    "is_last_epoch": False,
    "evaluations_done": 0,
    "additional_metrics": {},
    "patience_left": {},
    "best_train_loss": math.inf,
    "finished": False,
    "num_checkpoints_made": 0,
    "model_savings": {},
    "best_valid_loss": math.inf,
}


@pytest.mark.spec("AC-081")
@pytest.mark.spec("AC-087")
def test_the_state_says_how_far_a_run_is(tmp_path: Path) -> None:
    class Trace(Noted):
        def __init__(self) -> None:
            super().__init__()
            self.seen: dict[str, list[Any]] = {}

        def note(self, hook: str, *names: str) -> None:
            self.seen.setdefault(hook, []).append(tuple(getattr(self.state, name) for name in names))

        def on_fit_start(self) -> None:
            self.start = {name: value for name, value in asdict(self.state).items() if name in STATE}

        def on_epoch_start(self) -> None:
            self.note("epoch start", "epoch", "is_last_epoch", "is_end_of_epoch")

        def on_before_training_step(self, batch: Any) -> None:
            self.note("before", "epoch", "train_step", "global_step", "is_last_training_batch", "is_last_epoch")

        def on_before_zero_grad(self, optimizer: Any) -> None:
            self.note("update", "global_step")

        def on_before_validation_step(self, batch: Any) -> None:
            self.note("validation", "val_key", "val_step", "is_last_validation_batch")

        def on_evaluation_start(self) -> None:
            self.note("evaluation", "global_step", "is_end_of_epoch", "evaluations_done")

        def on_evaluation_end(self) -> None:
            self.note("evaluated", "evaluations_done", "num_checkpoints_made")

        def on_epoch_end(self) -> None:
            self.note("epoch end", "is_end_of_epoch", "num_checkpoints_made", "finished")

    trace = Trace()
    options: dict[str, Any] = {"metrics": Rows(answers=[0.25, 0.75]), "patience": {"best_valid_loss": 7}}
    made, module = fitted(tmp_path, callback=trace, **options)
    assert {**trace.start, "patience_left": {}} == STATE and trace.start["patience_left"] == {"best_valid_loss": 7}
    assert trace.seen == {
        "epoch start": [(0, False, False), (1, True, False)],
        "before": [(step // 12, step % 12, step, step % 12 == 11, step >= 12) for step in range(24)],
        "update": [(step,) for step in range(24)],
        "evaluation": [(12, True, 0), (24, True, 1)],
        "validation": [("0", step, step == 3) for step in range(4)] * 2,
        "evaluated": [(1, 0), (2, 1)],
        "epoch end": [(True, 1, False), (True, 2, False)],
    }
    state = made.state
    assert module.state is state
    assert (
        json.loads(state.to_json())
        == asdict(state)
        == {
            "global_step": 24,
            "train_step": 11,
            "val_step": 3,
            "epoch": 1,
            "is_end_of_epoch": True,
            "is_last_training_batch": True,
            "is_last_validation_batch": True,
            "is_last_epoch": True,
            "evaluations_done": 2,
            "additional_metrics": {
                "0": {"valid_loss": pytest.approx(8.92e-5, abs=1e-6), "accuracy": 0.75, "other": 0.25}
            },
            "patience_left": {"best_valid_loss": 7},
            "best_train_loss": pytest.approx(0.00435, abs=1e-5),
            "best_valid_loss": pytest.approx(8.92e-5, abs=1e-6),
            "model_savings": {"best_valid_loss": pytest.approx(8.92e-5, abs=1e-6)},
            "finished": True,
            "num_checkpoints_made": 2,
            "val_key": "0",
        }
    )
    assert module.seen[15] == (1, 3, 15, False)
    for write in (lambda: setattr(state, "epoch", 7), lambda: state.update(epoch=7), state.reset):
        with pytest.raises(Exception, match="the state of a run cannot be written") as refused:
            write()
        assert refused.type is AttributeError
    state.additional_metrics["0"]["accuracy"] = 0.0
    assert state.epoch == 1 and state.additional_metrics["0"]["accuracy"] == 0.75
    made = trainer(tmp_path / "twice", hps(epochs=1), enable_checkpointing=False)
    made.fit(Bowl(), bowls(8), bowls(8))
    assert (made.state.evaluations_done, made.state.val_key) == (1, "0")
    made.fit(Bowl(), bowls(8))
    assert (made.state.evaluations_done, made.state.val_key, made.state.best_valid_loss) == (0, "", math.inf)


@pytest.mark.spec("AC-081")
def test_a_module_logs_with_the_tracker_and_reads_the_old_status(tmp_path: Path) -> None:
    class Logs(Bowl):
        def __init__(self) -> None:
            super().__init__()
            self.status: list[Any] = []

        def training_step(self, batch: Any) -> Tensor:
            self.tracker.log({"mine": self.state.global_step * 10.0}, self.state.global_step)
            with warnings.catch_warnings(record=True) as noted:
                warnings.simplefilter("always")
                self.status.append(self.status_dict)
            assert [(each.category, str(each.message)) for each in noted] == [
                (DeprecationWarning, "status_dict is deprecated: use self.state")
            ]
            return super().training_step(batch)

    _, module = fitted(tmp_path, hps(max_steps=14), module=Logs(), val=None)
    assert logged(tmp_path, "mine") == {step: step * 10.0 for step in range(14)}
    assert [(each["epoch_step"], each["epoch"]) for each in module.status[11:]] == [(11, 0), (0, 1), (1, 1)]
    with pytest.raises(TypeError):
        module.status[0]["epoch"] = 3


@pytest.mark.spec("AC-082")
def test_tensors_are_padded_to_one_length() -> None:
    pad = AcceleratorModule().pad
    rows = [torch.tensor([1, 2]), torch.tensor([3, 4, 5])]
    for longest in (pad(rows, 9), pad(rows, 9, "longest"), pad(rows, 9, max_length=7)):
        assert type(longest) is list and [each.tolist() for each in longest] == [[1, 2, 9], [3, 4, 5]]
    left = pad(tuple(rows), 9, side="left")
    assert type(left) is tuple and [each.tolist() for each in left] == [[9, 1, 2], [3, 4, 5]]
    assert [each.tolist() for each in pad(rows, 9, "max_length", 4)] == [[1, 2, 9, 9], [3, 4, 5, 9]]
    assert pad(rows, 9, op="stack").tolist() == [[1, 2, 9], [3, 4, 5]]
    assert pad(rows, 9, op="cat").tolist() == [1, 2, 9, 3, 4, 5]
    lists = pad(tuple(rows), 9, op=lambda padded: (type(padded), [each.tolist() for each in padded]))
    assert lists == (list, [[1, 2, 9], [3, 4, 5]])
    assert [each.shape for each in pad([torch.ones(2, 2), torch.ones(2, 4)], 0)] == [(2, 4), (2, 4)]
    assert pad(rows[0], 9, max_length=4).tolist() == [1, 2, 9, 9]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"tensor": rows[0], "padding": "longest", "max_length": 4}, "one tensor is padded to max_length"),
        ({"tensor": rows[0]}, "needs max_length"),
        ({"tensor": rows, "padding": "max_length"}, "needs max_length"),
        ({"tensor": rows[1], "max_length": 2}, "is longer than 2"),
        ({"tensor": rows[0], "max_length": 4, "op": "stack"}, "op is for several"),
        ({"tensor": rows, "side": "up"}, "side 'left' or 'right'"),
        ({"tensor": rows, "padding": "shortest"}, "not 'shortest'"),
        ({"tensor": rows, "op": "sum"}, "not 'sum'"),
    ]
    for given, problem in wrong:
        with pytest.raises(Exception, match=problem) as refused:
            pad(value=0, **given)
        assert isinstance(refused.value, ValueError)
