"""Hooks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from trainkit.dialects.accmt.callbacks import Callback
from trainkit.dialects.accmt.decorators import (
    on_last_process,
    on_local_main_process,
    on_main_process,
    on_process,
)
from trainkit.dialects.accmt.resuming import indices
from trainkit.errors import OutOfMemory

from libs.trainkit.tests.dialects.accmt.bowl import (
    ROWS_OF_HOOKS,
    Bowl,
    Noted,
    Rows,
    Stop,
    StopsAt,
    bowls,
    fitted,
    hps,
)

# The module returns the values of a metric that most runs here do not have.
pytestmark = pytest.mark.filterwarnings("ignore:validation_step returned")


@pytest.mark.spec("AC-090")
@pytest.mark.spec("AC-091")
@pytest.mark.spec("AC-092")
@pytest.mark.spec("AC-093")
@pytest.mark.spec("AC-097")
@pytest.mark.spec("AC-098")
@pytest.mark.spec("AC-099")
def test_hooks_are_called_as_often_as_things_happen(tmp_path: Path) -> None:
    noted = Noted()
    made, module = fitted(tmp_path, callback=[noted])
    assert noted.module is module and noted.trainer is made and noted.state is made.state
    counts = {hook: noted.calls.count(hook) for hook in ROWS_OF_HOOKS}
    assert counts == {
        **dict.fromkeys(ROWS_OF_HOOKS, 0),
        **dict.fromkeys(("on_fit_start", "on_fit_end"), 1),
        **dict.fromkeys(("on_epoch_start", "on_epoch_end", "on_evaluation_start", "on_evaluation_end"), 2),
        **dict.fromkeys(("on_before_training_step", "on_after_training_step"), 24),
        **dict.fromkeys(("on_before_backward", "on_after_backward"), 24),
        **dict.fromkeys(("on_before_optimizer_step", "on_after_optimizer_step"), 24),
        **dict.fromkeys(("on_before_zero_grad", "on_after_zero_grad"), 24),
        **dict.fromkeys(("on_before_validation_step", "on_after_validation_step"), 8),
        "on_save_checkpoint": 2,
    }
    assert float(noted.given["on_before_backward"][0]) == 4.0
    noted = Noted()
    several = {"val": {"a": bowls(32), "b": bowls(16)}, "grad_accumulation_steps": 4, "enable_checkpointing": False}
    fitted(tmp_path / "sets", callback=noted, **several)
    assert noted.calls.count("on_evaluation_start") == noted.calls.count("on_evaluation_end") == 2
    assert noted.calls.count("on_before_validation_step") == 12
    assert float(noted.given["on_before_backward"][0]) == 4.0
    noted = Noted()
    fitted(tmp_path, hps(epochs=3), callback=noted)
    assert noted.calls.count("on_resume") == 1


@pytest.mark.spec("AC-088")
def test_callbacks_run_in_the_order_of_their_list_and_find_what_they_need(tmp_path: Path) -> None:
    calls: list[tuple[int, Any, Any, Any]] = []

    class Numbered(Callback):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number

        def on_fit_start(self) -> None:
            calls.append((self.number, self.module, self.trainer, self.state))

    made, module = fitted(tmp_path / "list", hps(max_steps=1), callback=[Numbered(1), Numbered(2)], val=None)
    assert calls == [(1, module, made, made.state), (2, module, made, made.state)]
    assert all(state is made.state for *_, state in calls)
    stops = StopsAt(1)
    with pytest.raises(Stop):
        fitted(tmp_path / "stop", callback=stops)
    (given,) = stops.given["on_exception"]
    assert isinstance(given[0], Stop) and "on_fit_end" not in stops.calls


@pytest.mark.spec("AC-089")
def test_a_decorated_hook_runs_on_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def where(decorator: Any) -> list[int]:
        """The processes, of 4 on two machines, on which the function runs; on the others it returns None."""
        answers = []
        for rank in range(4):
            for name, value in (("RANK", rank), ("LOCAL_RANK", rank % 2), ("WORLD_SIZE", 4)):
                monkeypatch.setenv(name, str(value))
            answers.append(decorator(lambda number, times: number * times)(21, times=2))
        assert set(answers) <= {42, None}
        return [rank for rank, answer in enumerate(answers) if answer == 42]

    assert where(on_main_process) == [0] and where(on_local_main_process) == [0, 2]
    assert where(on_last_process) == [3] and where(on_process(2)) == [2]


@pytest.mark.spec("AC-090")
@pytest.mark.spec("AC-091")
@pytest.mark.spec("AC-097")
@pytest.mark.spec("AC-099")
def test_hooks_come_in_the_order_of_what_they_are_about(tmp_path: Path) -> None:
    found: dict[str, list[Any]] = {}

    class Watch(Noted):
        def on_evaluation_end(self) -> None:
            super().on_evaluation_end()
            state = self.state
            assert state is not None
            values = (state.additional_metrics, state.evaluations_done, dict(state.model_savings))
            found.setdefault("evaluated", []).append(copy.deepcopy(values))

        def on_save_checkpoint(self) -> None:
            super().on_save_checkpoint()
            found.setdefault("saved", []).append([path.name for path in indices(tmp_path / "checkpoints").values()])

        def on_resume(self) -> None:
            super().on_resume()
            found["resumed"] = [self.state and self.state.global_step, self.module and self.module.model.w.item()]

    watch = Watch()
    numbers = hps(optim_kwargs={"lr": 0.0})
    options: dict[str, Any] = {"metrics": Rows(answers=[0.25, 0.75]), "patience": {"best_valid_loss": 1}}
    fitted(tmp_path, numbers, callback=watch, multiple_checkpoints=True, **options)  # stops early: nothing is gained
    assert [call for call in watch.calls if not call.startswith(("on_before", "on_after"))] == [
        "on_fit_start",
        *("on_epoch_start", "on_evaluation_start", "on_evaluation_end", "on_save_checkpoint", "on_epoch_end") * 2,
        "on_fit_end",
    ]
    assert watch.calls.index("on_before_training_step") == watch.calls.index("on_epoch_start") + 1
    assert watch.calls.index("on_before_validation_step") == watch.calls.index("on_evaluation_start") + 1
    assert found["evaluated"] == [
        ({"0": {"valid_loss": 4.0, "accuracy": accuracy, "other": 0.25}}, done, {"best_valid_loss": 4.0})
        for done, accuracy in ((1, 0.25), (2, 0.75))
    ]
    assert found["saved"] == [["step-12"], ["step-12", "step-24"]]
    fitted(tmp_path, hps(epochs=3), callback=watch, multiple_checkpoints=True)
    assert found["resumed"] == [24, 0.0]


@pytest.mark.spec("AC-092")
@pytest.mark.spec("AC-093")
@pytest.mark.spec("AC-098")
def test_hooks_are_around_a_step_and_get_what_it_is_about(tmp_path: Path) -> None:
    calls: list[Any] = []
    held: list[Any] = []  # so that no id is given twice

    class Steps(Bowl):
        failed = False

        def training_step(self, batch: Any) -> Tensor:
            held.append(batch)
            calls.append(("step", id(batch)))
            if not self.failed:
                self.failed = True
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().training_step(batch)

        def validation_step(self, key: str, batch: Any) -> Any:
            held.append(batch)
            calls.append(("validation", id(batch)))
            return super().validation_step(key, batch)

    class Watch(Callback):
        def on_before_training_step(self, batch: Any) -> None:
            calls.append(("before", id(batch)))

        def on_after_training_step(self) -> None:
            calls.append("after")

        def on_before_backward(self, loss: Tensor) -> None:
            assert self.module is not None
            calls.append(("loss", loss.item(), loss.shape, self.module.model.w.grad))

        def on_after_backward(self) -> None:
            assert self.module is not None
            calls.append(("gradient", self.module.model.w.grad.item()))

        def on_before_validation_step(self, batch: Any) -> None:
            assert self.state is not None
            calls.append(("before", self.state.val_key, id(batch)))

        def on_after_validation_step(self) -> None:
            calls.append("after")

    sets = {"a": bowls(8), "b": bowls(8)}
    options: dict[str, Any] = {"enable_checkpointing": False, "grad_accumulation_steps": 2, "eval_when_start": True}
    fitted(tmp_path, hps(max_steps=2), module=Steps(), callback=Watch(), val=sets, **options)
    batches = [call[-1] for call in calls if call[0] in ("step", "validation")]
    one, other, failed, first, second = batches[:5]
    assert calls[:6] == [
        *[("before", "a", one), ("validation", one), "after"],
        *[("before", "b", other), ("validation", other), "after"],
    ]
    assert failed == first != second  # the step that did not fit is tried again
    assert calls[6:18] == [
        *[("before", first), ("step", first)] * 2,
        "after",
        ("loss", 4.0, (), None),
        ("gradient", -2.0),
        *[("before", second), ("step", second)],
        "after",
        ("loss", 4.0, (), None),  # gradients of the window's earlier steps are set aside, in case of a second attempt
        ("gradient", -2.0),
    ]


@pytest.mark.spec("AC-094")
@pytest.mark.spec("AC-095")
@pytest.mark.spec("AC-096")
def test_hooks_around_an_update(tmp_path: Path) -> None:
    class Watch(Noted):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Any] = []

        def note(self, what: str, optimizer: Any) -> None:
            assert self.module is not None
            weight = self.module.model.w
            assert optimizer.param_groups[0]["params"] == [weight]
            gradient = None if weight.grad is None else round(weight.grad.item(), 5)
            self.seen.append((what, round(weight.item(), 5), gradient))

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.note("update", optimizer)

        def on_after_optimizer_step(self, optimizer: Any) -> None:
            self.note("updated", optimizer)

        def on_before_scheduler_step(self, scheduler: Any) -> None:
            self.seen.append(("schedule", scheduler and scheduler.get_last_lr()))

        def on_after_scheduler_step(self, scheduler: Any) -> None:
            self.seen.append(("scheduled", scheduler.get_last_lr()))

        def on_before_zero_grad(self, optimizer: Any) -> None:
            self.note("clear", optimizer)

        def on_after_zero_grad(self, optimizer: Any) -> None:
            self.note("cleared", optimizer)

    halved: dict[str, Any] = {"scheduler": "StepLR", "scheduler_kwargs": {"step_size": 1, "gamma": 0.5}}
    each = ["update", "updated", "clear", "cleared"]
    each_scheduled = ["update", "updated", "schedule", "scheduled", "clear", "cleared"]
    ends = ["schedule", "scheduled"]
    cases: list[tuple[Any, int, list[str]]] = [
        (hps(), 4, each * 6),
        (hps(max_steps=3, **halved), 1, each_scheduled * 3),
        (hps(**halved, step_scheduler_per_epoch=True), 1, (each * 12 + ends) * 2),
    ]
    watches: list[Watch] = []
    for at, (numbers, accumulate, hooks) in enumerate(cases):
        watches.append(Watch())
        options = {"grad_accumulation_steps": accumulate, "enable_checkpointing": False, "clip_grad": 1.0}
        fitted(tmp_path / str(at), numbers, callback=watches[-1], val=None, **options)
        assert [call[0] for call in watches[-1].seen] == hooks
    assert watches[0].seen[:4] == [  # the gradient -4 is clipped to -1
        ("update", 0.0, -1.0),
        ("updated", 0.1, -1.0),
        ("clear", 0.1, -1.0),
        ("cleared", 0.1, None),
    ]
    assert watches[1].seen[6:12] == [
        ("update", 0.1, -1.0),
        ("updated", 0.15, -1.0),
        ("schedule", [0.05]),
        ("scheduled", [0.025]),
        ("clear", 0.15, -1.0),
        ("cleared", 0.15, None),
    ]
    assert [call for call in watches[2].seen if call[0] in ends] == [
        ("schedule", [0.1]),
        ("scheduled", [0.05]),
        ("schedule", [0.05]),
        ("scheduled", [0.025]),
    ]


@pytest.mark.spec("AC-090")
@pytest.mark.spec("AC-100")
@pytest.mark.parametrize(
    ("error", "hook"),
    [
        (RuntimeError("broken"), "on_runtime_error"),
        (torch.OutOfMemoryError("CUDA out of memory"), "on_cuda_out_of_memory"),
        (KeyboardInterrupt(), "on_keyboard_interrupt"),
        (ValueError("wrong"), "on_exception"),
    ],
)
def test_each_error_has_one_hook_and_goes_on(tmp_path: Path, error: BaseException, hook: str) -> None:
    class Raises(Bowl):
        def training_step(self, batch: Any) -> Tensor:
            raise error

    for safe in (False, True):
        noted = Noted()
        with pytest.raises(BaseException) as raised:
            fitted(tmp_path / str(safe), module=Raises(), callback=noted, safe_steps=safe)
        assert [call for call in noted.calls if call in ROWS_OF_HOOKS[-4:]] == [hook]
        assert noted.given[hook] == [(raised.value,)] and "on_fit_end" not in noted.calls
        retried = safe and hook == "on_cuda_out_of_memory"
        assert raised.type is OutOfMemory if retried else raised.value is error
