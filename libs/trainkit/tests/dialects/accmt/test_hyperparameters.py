"""Hyperparameters in code and in files."""

from __future__ import annotations

import inspect
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from trainkit.config.reading import read_yaml
from trainkit.dialects.accmt import HyperParameters, Optimizer, Scheduler
from trainkit.dialects.accmt.callbacks import Callback
from trainkit.dialects.accmt.utils import set_seed
from trainkit.trainer import Totals

from libs.trainkit.tests.dialects.accmt.bowl import (
    fitted,
    hps,
    trainer,
)

# The module returns the values of a metric that most runs here do not have.
pytestmark = pytest.mark.filterwarnings("ignore:validation_step returned")


@pytest.mark.spec("AC-002")
def test_hyperparameters_are_given_in_three_ways(tmp_path: Path) -> None:
    file = tmp_path / "hps.yaml"
    file.write_text("hps:\n  epochs: 2\n  batch_size: 8\n  optim: {type: SGD, lr: 1e-1}\n")
    mapping = {"epochs": 2, "batch_size": 8, "optimizer": "SGD", "optim_kwargs": {"lr": 0.1}}
    ways = [hps(), mapping, str(file)]
    ends = {fitted(tmp_path / str(at), way)[1].w for at, way in enumerate(ways)}
    assert len(ends) == 1 and ends.pop() == pytest.approx(2 - 2 * 0.8**24)
    with pytest.raises(FileNotFoundError, match=r"no\.yaml"):
        trainer(tmp_path / "none", str(tmp_path / "no.yaml"))
    file.write_text("")
    with pytest.raises(ValueError, match=r"hps\.yaml"):
        trainer(tmp_path / "empty", str(file))
    file.write_text("hps:\n  epochs: 2\n  epoch: 3\n")
    with pytest.raises(ValueError, match=r"hps\.yaml:3.*epoch"):
        trainer(tmp_path / "unknown", str(file))


@pytest.mark.spec("AC-111")
@pytest.mark.spec("AC-X01")
def test_both_forms_of_a_file_are_equal_and_unknown_keys_are_named_with_their_line(tmp_path: Path) -> None:
    nested, flat = tmp_path / "nested.yaml", tmp_path / "flat.yaml"
    nested.write_text(
        "hps:\n  epochs: 3\n  batch_size: [32, 64]\n  optim: {type: AdamW, lr: 1e-3, eps: '1e-6', betas: [0.8, 9e-1]}\n"
        "  scheduler: {type: LinearWithWarmup, num_warmup_steps: 13}\n  step_scheduler_per_epoch: true\n"
    )
    flat.write_text(
        "epochs: 3\nbatch_size: [32, 64]\noptimizer: AdamW\noptim_kwargs: {lr: 1e-3, eps: '1e-6', betas: [0.8, 9e-1]}\n"
        "scheduler: LinearWithWarmup\nscheduler_kwargs: {num_warmup_steps: 13}\nstep_scheduler_per_epoch: true\n"
    )
    one, other = HyperParameters.of(str(nested)), HyperParameters.of(str(flat))
    assert one == other == HyperParameters.of({"hps": read_yaml(flat.read_text()).data})
    assert (one.epochs, one.batch_size, one.optimizer, one.scheduler) == (3, (32, 64), "AdamW", "LinearWithWarmup")
    assert one.scheduler_kwargs == {"num_warmup_steps": 13} and one.step_scheduler_per_epoch
    made = one.make_optimizer()([("w", nn.Parameter(torch.zeros(1)))])
    group = made.param_groups[0]
    assert type(made) is torch.optim.AdamW
    assert (group["lr"], group["eps"], group["betas"]) == (0.001, 1e-6, (0.8, 0.9))
    flat.write_text("epochs: 3\nepoch: 4\n")
    nested.write_text("hps:\n  epochs: 3\n\n  epoch: 4\n")
    for file, line in ((flat, 2), (nested, 4)):
        with pytest.raises(Exception, match=rf"{file.name}:{line}.*epoch.*did you mean epochs") as refused:
            HyperParameters.of(str(file))
        assert isinstance(refused.value, ValueError)
    with pytest.raises(Exception, match="optim needs a 'type'") as refused:
        HyperParameters.of({"optim": {"lr": 0.1}})
    assert isinstance(refused.value, ValueError)


@pytest.mark.spec("AC-110")
def test_max_steps_end_a_run_within_an_epoch_and_wrong_numbers_are_refused(tmp_path: Path) -> None:
    defaults = [(each.name, each.default) for each in inspect.signature(HyperParameters).parameters.values()]
    assert defaults == [
        ("epochs", 1),
        ("max_steps", None),
        ("batch_size", 1),
        ("optimizer", "SGD"),
        ("optim_kwargs", None),
        ("scheduler", None),
        ("scheduler_kwargs", None),
        ("step_scheduler_per_epoch", False),
    ]
    made, module = fitted(tmp_path, hps(max_steps=30, batch_size=(8, 16)))
    assert (made.state.global_step, made.state.epoch, made.state.train_step) == (30, 2, 5)
    assert len(module.keys) == 2 * made.state.evaluations_done and len(module.seen) == 30
    wrong: list[tuple[dict[str, Any], str]] = [
        *(({name: value}, f"{name} has to be") for name in ("epochs", "max_steps") for value in (0, -1, 1.5, True)),
        *(({"batch_size": value}, "batch_size has to be") for value in (0, (8, 0), (0, 8))),
        ({"batch_size": (1, 2, 3)}, "batch_size is one number or a pair"),
        ({"epochs": None}, "give epochs or max_steps"),
        ({"optim_kwargs": {"learning": 1}}, r"SGD: learning: .*allowed: lr, momentum"),
        ({"scheduler": "StepLR", "scheduler_kwargs": {"steps": 1}}, r"StepLR: steps: .*allowed: step_size, gamma"),
        ({"optimizer": "SDG"}, ", ".join(Optimizer)),
        ({"scheduler": "Linear"}, ", ".join(sorted(Scheduler))),
    ]
    for given, problem in wrong:
        with pytest.raises(Exception, match=problem) as refused:
            hps(**given)
        assert isinstance(refused.value, ValueError)
    assert hps(epochs=None, max_steps=3).max_duration == "3st" and hps(epochs=3).max_duration == "3ep"


@pytest.mark.spec("AC-110")
def test_optimizers_and_schedules_are_given_by_name_or_by_member() -> None:
    assert (len(Optimizer), len(Scheduler)) == (13, 14)
    weight = [("w", nn.Parameter(torch.zeros(1)))]
    for given in ("Rprop", Optimizer.Rprop):
        assert type(HyperParameters(optimizer=given).make_optimizer()(weight)) is torch.optim.Rprop
    made = HyperParameters().make_optimizer()(weight)
    assert type(made) is torch.optim.SGD and made.param_groups[0]["lr"] == 1e-3
    assert HyperParameters().make_schedule() is None
    for given in ("StepLR", Scheduler.StepLR):
        factory = HyperParameters(scheduler=given, scheduler_kwargs={"step_size": 7}).make_schedule()
        assert factory is not None
        schedule = factory(made, Totals(10, 1, 10))
        assert type(schedule) is torch.optim.lr_scheduler.StepLR and schedule.step_size == 7


@pytest.mark.spec("AC-112")
@pytest.mark.spec("AC-X02")
def test_a_schedule_is_told_how_long_the_run_is(tmp_path: Path) -> None:
    numbers: dict[str, Any] = {"scheduler": "LinearWithWarmup", "scheduler_kwargs": {"num_warmup_steps": 0}}
    rates: list[float] = []

    class Watch(Callback):
        def on_after_scheduler_step(self, scheduler: Any) -> None:
            rates.append(scheduler.get_last_lr()[0])

    def rates_of(folder: str, accumulation: int = 1, **changes: Any) -> list[float]:
        rates.clear()
        options = {"grad_accumulation_steps": accumulation, "enable_checkpointing": False, "val": None}
        fitted(tmp_path / folder, hps(**{**numbers, **changes}), callback=Watch(), **options)
        return list(rates)

    assert rates_of("a", 4) == pytest.approx([0.1 * left / 6 for left in (5, 4, 3, 2, 1, 0)])
    found = rates_of("b", 5, max_steps=30)
    assert len(found) == 8 and found[-2:] == pytest.approx([0.1 / 8, 0])
    assert rates_of("c", 5, epochs=4, step_scheduler_per_epoch=True) == pytest.approx([0.075, 0.05, 0.025, 0])
    explicit = {"num_warmup_steps": 0, "num_training_steps": 20}
    assert rates_of("d", 4, scheduler_kwargs=explicit) == pytest.approx([0.1 - 0.005 * done for done in range(1, 7)])

    def cycle(folder: str, **arguments: Any) -> list[float]:
        given = {"max_lr": 0.1, "cycle_momentum": False, **arguments}
        return rates_of(folder, 4, scheduler="OneCycleLR", scheduler_kwargs=given)

    whole = [cycle("e"), cycle("f", total_steps=6), cycle("g", epochs=2), cycle("h", steps_per_epoch=3)]
    assert len(whole[0]) == 6 and all(each == whole[0] for each in whole)
    for at, short in enumerate(({"total_steps": 5}, {"epochs": 1})):
        with pytest.raises(
            Exception, match=r"ends after \d steps, but the run has 6; leave total_steps out"
        ) as refused:
            cycle(f"short-{at}", **short)
        assert isinstance(refused.value, ValueError) and not rates


@pytest.mark.spec("AC-X03")
def test_a_seed_makes_a_run_repeatable() -> None:
    def drawn(seed: int) -> tuple[Any, ...]:
        set_seed(seed)
        return random.random(), numpy.random.rand(), torch.rand(1).item()

    assert drawn(7) == drawn(7) and not set(drawn(7)) & set(drawn(8))
