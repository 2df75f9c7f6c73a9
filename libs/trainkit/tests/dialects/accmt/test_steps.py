"""Steps and updates."""

from __future__ import annotations

import contextlib
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from trainkit.callbacks.weights import load_weights
from trainkit.dialects.accmt import ExtendedAcceleratorModule, Monitor, Trainer
from trainkit.dialects.accmt.callbacks import Callback
from trainkit.dialects.accmt.launching import VARIABLE
from trainkit.errors import InvalidStep, OutOfMemory
from trainkit.precision import Precision

from libs.trainkit.tests.dialects.accmt.bowl import (
    Bowl,
    Noted,
    Weight,
    bowls,
    fitted,
    hps,
    logged,
    trainer,
)

# The module returns the values of a metric that most runs here do not have.
pytestmark = pytest.mark.filterwarnings("ignore:validation_step returned")


@pytest.mark.spec("AC-023")
def test_a_step_goes_backward_and_updates(tmp_path: Path) -> None:
    assert fitted(tmp_path / "1", hps(max_steps=1))[1].w == pytest.approx(0.4)
    assert fitted(tmp_path / "2", hps(max_steps=2))[1].w == pytest.approx(0.72)

    class Detached(Bowl):
        def training_step(self, batch: Any) -> Tensor:
            return super().training_step(batch).detach()

    class Each(Bowl):
        def training_step(self, batch: Any) -> Tensor:
            return (self(batch[0]) - batch[1]) ** 2

    class Number(Bowl):
        def training_step(self, batch: Any) -> Any:
            return 1.0

    for kind in (Detached, Each, Number):
        with pytest.raises((TypeError, InvalidStep), match=r"^training_step has to return a scalar tensor"):
            fitted(tmp_path / kind.__name__, module=kind())
    noted = Noted()
    fitted(tmp_path / "order", hps(max_steps=1, scheduler="Constant"), val=None, callback=noted)
    first = noted.calls.index("on_before_training_step")
    assert noted.calls[first : noted.calls.index("on_after_zero_grad") + 1] == [
        f"on_{when}_{what}"
        for what in ("training_step", "backward", "optimizer_step", "scheduler_step", "zero_grad")
        for when in ("before", "after")
    ]


def _places(calls: list[str], call: str) -> list[int]:
    return [at for at, each in enumerate(calls) if each == call]


@pytest.mark.spec("AC-024")
def test_accumulated_steps_make_one_update_and_leftover_ones_too(tmp_path: Path) -> None:
    for accumulate in (4, 5):
        noted = Noted()
        options: dict[str, Any] = {"grad_accumulation_steps": accumulate, "callback": noted}
        _, module = fitted(tmp_path / str(accumulate), hps(epochs=1), **options)
        assert module.w == pytest.approx(0.976, abs=1e-6)
        assert noted.calls.count("on_after_optimizer_step") == 3
        updates = [call for call in noted.calls if call in ("on_after_training_step", "on_after_optimizer_step")]
        steps = [at - done for done, at in enumerate(_places(updates, "on_after_optimizer_step"))]
        assert steps == ([4, 8, 12] if accumulate == 4 else [5, 10, 12])

    class ByHand(ExtendedAcceleratorModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Weight()

        def training_step(self, batch: Any) -> Tensor:
            loss: Tensor = ((self(batch[0]) - batch[1]) ** 2).mean()
            self.backward(loss)
            self.step()
            self.zero_grad()
            return loss

    by_hand: Any = ByHand()
    with pytest.warns(UserWarning, match="grad_accumulation_steps is ignored"):
        fitted(tmp_path / "hand", hps(max_steps=1), module=by_hand, val=None, grad_accumulation_steps=4)
    assert float(by_hand.model.w.detach()) == pytest.approx(0.4)
    with pytest.raises(ValueError, match="grad_accumulation_steps"):
        trainer(tmp_path, grad_accumulation_steps=0)


@pytest.mark.spec("AC-025")
def test_gradients_are_clipped_at_one_unless_told_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Trainer(hps(max_steps=1), tmp_path, dataloader_num_workers=0)
    module = Bowl()
    made.fit(module, bowls(96))
    assert module.w == pytest.approx(0.1)
    assert fitted(tmp_path / "none", hps(max_steps=1), val=None, clip_grad=None)[1].w == pytest.approx(0.4)

    class Steep(Bowl):
        def training_step(self, batch: Any) -> Tensor:
            return (self.model.weight * torch.tensor([3.0, 4.0, 0.0, 0.0])).sum()

    class Watch(Callback):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            found.append(optimizer.param_groups[0]["params"][0].grad.flatten().tolist())

    found: list[list[float]] = []
    steep = Steep()
    steep.model = nn.Linear(4, 1, bias=False)
    options: dict[str, Any] = {"clip_grad": 1.0, "monitor": Monitor(grad_norm=True), "log_every": 1}
    fitted(tmp_path / "steep", hps(max_steps=1), module=steep, val=None, callback=Watch(), **options)
    assert found == [pytest.approx([0.6, 0.8, 0.0, 0.0])] and logged(tmp_path / "steep", "grad_norm") == {1: 5.0}

    monkeypatch.setenv(VARIABLE, "single-fp16")
    steep.model = nn.Linear(4, 1, bias=False)
    before = steep.model.weight.detach().clone()
    options |= {"grad_accumulation_steps": 2, "enable_checkpointing": False}
    fitted(tmp_path / "half", hps(max_steps=2), module=steep, val=None, **options)
    moved = before - steep.model.weight.detach()
    assert moved.flatten().tolist() == pytest.approx([0.06, 0.08, 0.0, 0.0], abs=1e-6)
    assert logged(tmp_path / "half", "grad_norm")[2] == pytest.approx(5.0)
    with pytest.warns(UserWarning, match="clip_grad=None"):
        Trainer(hps(optimizer="Adafactor"), tmp_path / "adafactor")
    trainer(tmp_path / "unclipped", hps(optimizer="Adafactor"))


def test_gradient_checkpointing_is_asked_of_the_model(tmp_path: Path) -> None:
    asked: list[Any] = []
    module = Bowl()
    module.model.gradient_checkpointing_enable = lambda gradient_checkpointing_kwargs: asked.append(
        gradient_checkpointing_kwargs
    )
    fitted(tmp_path / "a", hps(max_steps=1), module=module, gradient_checkpointing=True)
    assert asked == [None]


@pytest.mark.spec("AC-X18")
def test_gradient_checkpointing_has_no_effect_on_a_model_that_does_not_offer_it(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, module = fitted(tmp_path / "b", hps(max_steps=2), val=None, gradient_checkpointing=True)
    said = [str(each.message) for each in caught if "gradient_checkpointing" in str(each.message)]
    assert said == [
        "gradient_checkpointing=True has no effect: Weight has no method gradient_checkpointing_enable",
    ]
    assert module.w == pytest.approx(0.72)


@pytest.mark.spec("AC-011")
def test_compiling_changes_neither_the_result_nor_the_names_of_weights(tmp_path: Path) -> None:
    graphs: list[list[str]] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op.startswith("call")])
        return graph.forward

    class Taught(Bowl):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = nn.Softplus()

        def training_step(self, batch: Any) -> Tensor:
            self.teacher(batch[0])
            return super().training_step(batch)

    _, plain = fitted(tmp_path / "plain", hps(epochs=1), module=Taught())
    kwargs: dict[str, Any] = {"compile": True, "compile_kwargs": {"backend": backend}}
    _, compiled = fitted(tmp_path / "compiled", hps(epochs=1), module=Taught(), **kwargs)
    assert plain.w == compiled.w
    assert any("softplus" in name for calls in graphs for name in calls)
    assert any("mul" in name for calls in graphs for name in calls)
    names = [set(load_weights(tmp_path / name / "best_valid_loss")) for name in ("plain", "compiled")]
    assert names[0] == names[1] == {"w"}
    with pytest.warns(UserWarning, match="compile_kwargs has no effect"):
        trainer(tmp_path, compile_kwargs={"backend": "eager"})


@pytest.mark.spec("AC-026")
def test_gradients_become_none_or_zero(tmp_path: Path) -> None:
    class Watch(Callback):
        def on_after_zero_grad(self, optimizer: Any) -> None:
            found.append(optimizer.param_groups[0]["params"][0].grad)

    found: list[Any] = []
    fitted(tmp_path / "none", hps(max_steps=1), val=None, callback=Watch())
    fitted(tmp_path / "zero", hps(max_steps=1), val=None, callback=Watch(), set_to_none=False)
    assert found[0] is None and found[1] is not None and torch.equal(found[1], torch.zeros(()))


@pytest.mark.spec("AC-027")
def test_recomputed_activations_change_no_loss(tmp_path: Path) -> None:
    asked: list[Any] = []

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last, self.recomputes = nn.Linear(1, 8), nn.Linear(8, 1), 0
            self.enabled = False

        def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any) -> None:
            asked.append(gradient_checkpointing_kwargs)
            self.enabled = True

        def hidden(self, x: Tensor) -> Tensor:
            self.recomputes += 1
            return torch.tanh(self.first(x))

        def forward(self, x: Tensor) -> Tensor:
            x = x[:, None]
            hidden = checkpoint(self.hidden, x, use_reentrant=False) if self.enabled else self.hidden(x)
            return self.last(hidden)[:, 0]

    losses, counts = [], []
    for enabled in (False, True):
        module = Bowl()
        module.model, place = Deep(), tmp_path / str(enabled)
        options: dict[str, Any] = {"gradient_checkpointing": enabled, "log_every": 1, "enable_checkpointing": False}
        kwargs = {"gradient_checkpointing_kwargs": {"use_reentrant": False}} if enabled else {}
        fitted(place, hps(epochs=1), module=module, val=None, **options, **kwargs)
        losses.append(list(logged(place, "train_loss").values()))
        counts.append(module.model.recomputes)
    assert asked == [{"use_reentrant": False}] and counts == [12, 24]
    module = Bowl()
    module.model = Deep()
    fitted(tmp_path / "bare", hps(max_steps=1), module=module, val=None, gradient_checkpointing=True)
    assert asked[1:] == [None]
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)


class Full(Bowl):
    """Runs out of memory in the backward pass of a step, so many times: some of the gradients are there already. The
    loss depends on random numbers."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times, self.calls = times, 0
        self.model.late = nn.Parameter(torch.ones(()))

    def training_step(self, batch: Any) -> Tensor:
        loss = super().training_step(batch) * torch.rand(())
        late = self.model.late * 1.0
        if self.state.global_step == 5:
            late.register_hook(self.fail)
        return loss + (0 * loss.detach() + late) * 1e-3

    def fail(self, gradient: Tensor) -> None:
        if self.times:
            self.times -= 1
            self.calls += 1
            self.model.w.grad = torch.full((), 100.0)  # as if this part came first
            raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.spec("AC-028")
def test_a_step_that_does_not_fit_is_tried_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "nvidia-smi").write_text(f"#!/bin/sh\necho '00000000:01:00.0, {os.getpid()}, 2048'\n")
    (programs / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    options: dict[str, Any] = {"grad_accumulation_steps": 4, "enable_checkpointing": False}
    _, undisturbed = fitted(tmp_path / "whole", module=Full(0), safe_steps=False, **options)
    noted = Noted()
    made, module = trainer(tmp_path / "once", callback=noted, **options), Full(1)
    with contextlib.suppress(torch.OutOfMemoryError):
        made.fit(module, bowls(96), bowls(32))
    assert made.state.global_step == 24 and module.w == undisturbed.w
    assert noted.calls.count("on_before_training_step") == 25
    full = Full(-1)
    freed: list[int] = []
    monkeypatch.setattr("trainkit.loop.recovery.free", lambda: freed.append(1))
    with pytest.raises(OutOfMemory, match=rf"GPU.*user.*PID.*GB\s+00000000:01:00.0 +\S+ +{os.getpid()} +2\.15"):
        fitted(tmp_path / "always", module=full, **options)
    assert full.calls == 2 and len(freed) == 2
    full = Full(-1)
    with pytest.raises((torch.OutOfMemoryError, OutOfMemory)) as raised:
        fitted(tmp_path / "unsafe", module=full, safe_steps=False, **options)
    assert full.calls == 1 and raised.type is torch.OutOfMemoryError

    class Evaluated(Bowl):
        times = 1

        def validation_step(self, key: str, batch: Any) -> Any:
            if self.times:
                self.times = 0
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().validation_step(key, batch)

    for name, kind in (("evaluated", Evaluated), ("unevaluated", Bowl)):
        fitted(tmp_path / name, module=kind(), **options)
    assert logged(tmp_path / "evaluated", "val_loss") == logged(tmp_path / "unevaluated", "val_loss")


@pytest.mark.spec("AC-029")
def test_memory_is_given_back_after_epochs_evaluations_and_so_many_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr("trainkit.memory.free", lambda: calls.append(1))
    for every, val, expected in ((None, ..., 4), (5, ..., 8), (None, None, 2)):
        calls.clear()
        options: dict[str, Any] = {"cleanup_cache_every_n_steps": every, "enable_checkpointing": False}
        fitted(tmp_path / f"{every}-{val}", val=val, **options)
        assert len(calls) == expected
    with pytest.raises(ValueError, match="cleanup_cache_every_n_steps"):
        trainer(tmp_path, cleanup_cache_every_n_steps=0)


@pytest.mark.spec("AC-031")
def test_an_overflow_skips_one_update_and_halves_the_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scales: list[float] = []

    found: list[torch.dtype] = []

    class Computed(Bowl):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Linear(1, 1)

        def forward(self, x: Tensor) -> Tensor:
            output = self.model(x[:, None])[:, 0]
            found.append(output.dtype)
            return output

    class Overflows(Bowl):
        def training_step(self, batch: Any) -> Tensor:
            predicted = self(batch[0])
            if self.state.global_step == 3:
                predicted.register_hook(lambda gradient: gradient * float("inf"))
            return ((predicted - batch[1]) ** 2).mean()

    def step(self: Any, optimizer: Any) -> bool:
        done = original(self, optimizer)
        scales.append(self.scaler.get_scale() if self.scaler is not None else 0.0)
        return done

    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        found.clear()
        monkeypatch.setenv(VARIABLE, f"single-{precision}")
        flat = Computed()
        fitted(
            tmp_path / precision,
            hps(max_steps=1),
            module=flat,
            val=None,
            disable_model_saving=True,
            enable_checkpointing=False,
        )
        assert found == [dtype] and flat.model.weight.dtype == torch.float32

    original = Precision.step
    monkeypatch.setattr(Precision, "step", step)
    monkeypatch.setenv(VARIABLE, "single-fp16")
    noted = Noted()
    options: dict[str, Any] = {"callback": noted, "log_every": None, "enable_checkpointing": False}
    numbers = hps(epochs=1, scheduler="Constant")
    _, module = fitted(tmp_path, numbers, module=Overflows(), val=None, disable_model_saving=True, **options)
    assert logged(tmp_path, "skipped_updates") == {4: 1}
    assert noted.calls.count("on_after_optimizer_step") == noted.calls.count("on_after_scheduler_step") == 11
    assert scales[3] == scales[2] / 2 == scales[-1] > 0
    assert module.model.w.dtype == torch.float32
    assert module.w == pytest.approx(2 - 2 * 0.8**11, abs=1e-3)


@pytest.mark.spec("AC-126")
@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_the_three_paths_of_an_optimizer_agree(name: str, device: str) -> None:
    plain = hps(optimizer=name).make_optimizer()([("w", nn.Parameter(torch.zeros(1)))])
    assert plain.defaults["foreach"] is plain.defaults["fused"] is None
    ends = []
    for path in ({"foreach": False}, {"foreach": True}, {"fused": True}):
        torch.manual_seed(0)
        weights = [nn.Parameter(torch.randn(5, 3, device=device)), nn.Parameter(torch.randn(4, device=device))]
        made = hps(optimizer=name, optim_kwargs={"lr": 0.01, **path}).make_optimizer()(
            [(str(at), weight) for at, weight in enumerate(weights)]
        )
        assert made.defaults[next(iter(path))] is next(iter(path.values()))
        for _ in range(5):
            made.zero_grad()
            sum((weight**2).sum() for weight in weights).backward()
            made.step()
        ends.append(torch.cat([weight.detach().flatten() for weight in weights]))
    assert not torch.equal(ends[0], torch.zeros_like(ends[0]))
    assert torch.allclose(ends[0], ends[1], atol=1e-6) and torch.allclose(ends[0], ends[2], atol=1e-6)
