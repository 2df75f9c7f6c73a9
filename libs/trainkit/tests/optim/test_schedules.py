"""Schedules by name: the published numbers, exact resume, and what a run fills in."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from trainkit import catalogue
from trainkit.errors import InvalidSetup
from trainkit.optim import optimizer, schedule
from trainkit.trainer import Totals

LONG = Totals(updates=10_000, epochs=10, updates_per_epoch=1_000)
WARM = {"num_warmup_steps": 10, "num_training_steps": 100}
CYCLE = {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 20}
CYCLE_ONCE = {"max_lr": 0.01, "pct_start": 0.5, "div_factor": 10.0, "final_div_factor": 100.0}


def built(name: str, lr: float = 1.0, totals: Totals = LONG, **arguments: Any) -> LRScheduler:
    made = optimizer("SGD", lr=lr, momentum=0.9)([("w", nn.Parameter(torch.zeros(1)))])
    stepped = schedule(name, **arguments)(made, totals)
    made.step()
    return stepped


def rates(name: str, steps: int, **arguments: Any) -> list[tuple[float, float]]:
    """Learning rate and momentum after 0, 1, ... scheduler steps."""
    made = built(name, **arguments)
    group = made.optimizer.param_groups[0]
    seen = [(float(group["lr"]), float(group["momentum"]))]
    for _ in range(steps):
        made.step()
        seen.append((float(group["lr"]), float(group["momentum"])))
    return seen


def row(identity: int, name: str, expected: dict[int, float], **arguments: Any) -> Any:
    mark = pytest.mark.spec(f"AC-{identity}")
    return pytest.param(name, arguments, expected, marks=mark, id=f"AC-{identity}-{name}-{'-'.join(arguments)}")


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        row(127, "Constant", {0: 0.1, 1000: 0.1}, lr=0.1),
        row(128, "ConstantWithWarmup", {0: 0.0, 5: 0.5, 10: 1.0, 99: 1.0}, num_warmup_steps=10),
        row(128, "ConstantWithWarmup", {0: 1.0, 9: 1.0}, num_warmup_steps=0),
        row(129, "CosineAnnealingLR", {5: 0.05, 10: 0.0, 20: 0.1}, lr=0.1, T_max=10),
        row(129, "CosineAnnealingLR", {0: 0.1, 5: 0.06, 10: 0.02}, lr=0.1, T_max=10, eta_min=0.02),
        row(130, "CosineAnnealingWarmRestarts", {2: 0.05, 4: 0.1, 8: 0.05, 12: 0.1}, lr=0.1, T_0=4, T_mult=2),
        row(130, "CosineAnnealingWarmRestarts", {0: 0.1, 2: 0.06, 3: 0.0317157, 4: 0.1}, lr=0.1, T_0=4, eta_min=0.02),
        row(131, "CosineWithHardRestartsWithWarmup", {5: 0.5, 10: 1.0, 55: 0.5, 100: 0.0}, **WARM),
        row(131, "CosineWithHardRestartsWithWarmup", {54: 0.00121797, 55: 1.0, 100: 0.0}, **WARM, num_cycles=2),
        row(132, "CosineWithWarmup", {5: 0.5, 40: 0.75, 55: 0.5, 100: 0.0}, **WARM),
        row(132, "CosineWithWarmup", {10: 1.0, 55: 0.0, 100: 1.0}, **WARM, num_cycles=1),
        row(133, "CyclicLR", {1000: 0.055, 2000: 0.1, 4000: 0.01}, base_lr=0.01, max_lr=0.1),
        row(133, "CyclicLR", {10: 0.0325, 30: 0.0325}, **CYCLE, scale_fn=lambda x: 0.5),
        row(133, "CyclicLR", {20: 0.019, 60: 0.0145}, **CYCLE, scale_fn=lambda cycle: 0.1 / cycle),
        row(133, "CyclicLR", {20: 0.028}, **CYCLE, scale_fn=lambda step: step / 100, scale_mode="iterations"),
        row(133, "CyclicLR", {10: 0.055, 20: 0.1, 40: 0.01}, base_lr=0.01, max_lr=0.1, step_size_up=20),
        row(133, "CyclicLR", {60: 0.055}, base_lr=0.01, max_lr=0.1, step_size_up=20, mode="triangular2"),
        row(133, "CyclicLR", {20: 0.0836116}, base_lr=0.01, max_lr=0.1, step_size_up=20, mode="exp_range", gamma=0.99),
        row(133, "CyclicLR", {40: 0.07, 50: 0.055}, base_lr=0.01, max_lr=0.1, step_size_up=20, step_size_down=60),
        row(134, "ExponentialLR", {10: 0.0348678}, lr=0.1, gamma=0.9),
        row(135, "InverseSQRT", {50: 0.5, 100: 1.0, 400: 0.5}, num_warmup_steps=100),
        row(135, "InverseSQRT", {0: 1.0, 30_000: 0.5}, num_warmup_steps=0),
        row(135, "InverseSQRT", {400: 0.70711}, num_warmup_steps=100, timescale=300),
        row(
            136,
            "LinearLR",
            {0: 0.025, 1: 0.03125, 2: 0.0375, 3: 0.04375, 4: 0.05, 5: 0.05},
            lr=0.05,
            start_factor=0.5,
            total_iters=4,
        ),
        row(136, "LinearLR", {0: 0.1 / 3, 5: 0.1, 9: 0.1}, lr=0.1),
        row(
            136, "LinearLR", {0: 0.1, 2: 0.06, 4: 0.02, 9: 0.02}, lr=0.1, start_factor=1, end_factor=0.2, total_iters=4
        ),
        row(137, "LinearWithWarmup", {5: 0.5, 55: 0.5, 100: 0.0}, num_warmup_steps=10),
        row(137, "LinearWithWarmup", {5: 0.5, 55: 0.5, 100: 0.0}, **WARM),
        row(138, "OneCycleLR", {0: 4e-4, 29: 0.01, 64: 0.00500002, 99: 4e-8}, max_lr=0.01, total_steps=100),
        row(138, "OneCycleLR", {58: 4e-4}, max_lr=0.01, total_steps=100, three_phase=True),
        row(138, "OneCycleLR", {0: 4e-4, 59: 0.01}, max_lr=0.01, epochs=20, steps_per_epoch=10),
        row(138, "OneCycleLR", {0: 4e-4, 29: 0.01, 43: 0.008000008}, max_lr=0.01, anneal_strategy="linear"),
        row(138, "OneCycleLR", {0: 0.001, 49: 0.01, 99: 1e-5}, **CYCLE_ONCE),
        row(139, "PolynomialDecayWithWarmup", {10: 1e-3, 55: 6e-4, 120: 2e-4}, lr=1e-3, lr_end=2e-4, **WARM),
        row(139, "PolynomialDecayWithWarmup", {5: 5e-4, 55: 5.0005e-4, 120: 1e-7}, lr=1e-3, **WARM),
        row(139, "PolynomialDecayWithWarmup", {55: 2.50075e-4}, lr=1e-3, power=2.0, **WARM),
        row(140, "StepLR", {29: 0.05, 30: 0.0125, 60: 0.003125}, lr=0.05, step_size=30, gamma=0.25),
        row(140, "StepLR", {29: 0.05, 30: 0.005, 60: 0.0005}, lr=0.05, step_size=30),
    ],
)
def test_a_schedule_by_name_gives_the_published_rates(
    name: str, arguments: dict[str, Any], expected: dict[int, float]
) -> None:
    totals = Totals(updates=100, epochs=1, updates_per_epoch=100)
    seen = rates(name, max(expected), totals=totals, **arguments)
    assert {step: seen[step][0] for step in expected} == pytest.approx(expected, rel=1e-5, abs=1e-9)


@pytest.mark.spec("AC-133")
def test_cycling_moves_the_momentum_the_other_way() -> None:
    def momenta(**arguments: Any) -> list[float]:
        seen = rates("CyclicLR", 40, **CYCLE, **arguments)
        return [seen[step][1] for step in (10, 20, 40)]

    assert momenta() == pytest.approx([0.85, 0.8, 0.9])
    assert momenta(base_momentum=0.5, max_momentum=0.7) == pytest.approx([0.6, 0.5, 0.7])
    assert momenta(cycle_momentum=False) == [0.9, 0.9, 0.9]


@pytest.mark.spec("AC-138")
def test_one_cycle_moves_the_momentum_and_refuses_more_steps_than_its_total() -> None:
    totals = Totals(updates=100, epochs=1, updates_per_epoch=100)

    def momenta(**arguments: Any) -> list[float]:
        seen = rates("OneCycleLR", 100, max_lr=0.01, totals=totals, **arguments)
        return [seen[step][1] for step in (0, 29)]

    assert momenta() == pytest.approx([0.95, 0.85])
    assert momenta(base_momentum=0.5, max_momentum=0.7) == pytest.approx([0.7, 0.5])
    assert momenta(cycle_momentum=False) == [0.9, 0.9]
    with pytest.raises(ValueError, match="101"):
        rates("OneCycleLR", 101, max_lr=0.01, totals=totals)


@pytest.mark.parametrize(
    ("name", "arguments", "problem"),
    [
        pytest.param("CosineAnnealingWarmRestarts", {"T_0": 0}, "T_0", marks=pytest.mark.spec("AC-130")),
        pytest.param(
            "CosineAnnealingWarmRestarts", {"T_0": 4, "T_mult": 0}, "T_mult", marks=pytest.mark.spec("AC-130")
        ),
        pytest.param("CyclicLR", {**CYCLE, "mode": "square"}, "mode", marks=pytest.mark.spec("AC-133")),
        pytest.param("ConstantWithWarmup", {"num_warmup_steps": -1}, "0 or more", marks=pytest.mark.spec("AC-128")),
    ],
)
def test_arguments_of_a_schedule_out_of_bounds_are_refused(name: str, arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        built(name, **arguments)


@pytest.mark.spec("AC-133")
def test_momentum_cannot_cycle_in_an_optimizer_without_momentum() -> None:
    made = optimizer("Adagrad")([("w", nn.Parameter(torch.zeros(1)))])
    with pytest.raises(ValueError, match="momentum"):
        schedule("CyclicLR", **CYCLE)(made, LONG)


@pytest.mark.spec("AC-130")
def test_warm_restarts_jump_to_a_position_and_go_on_from_there() -> None:
    made = built("CosineAnnealingWarmRestarts", lr=0.1, T_0=4, T_mult=2)
    made.step(26)
    made.step()
    other = built("CosineAnnealingWarmRestarts", lr=0.1, T_0=4, T_mult=2)
    other.step(27)
    assert made.get_last_lr() == other.get_last_lr() == pytest.approx([0.1 * (1 + math.cos(math.pi * 15 / 16)) / 2])


@pytest.mark.parametrize("name", catalogue.names("schedule"))
def test_a_restored_schedule_continues_with_the_same_bits(name: str) -> None:
    arguments = {
        "CosineAnnealingLR": {"T_max": 17},
        "CosineAnnealingWarmRestarts": {"T_0": 5},
        "CyclicLR": {"base_lr": 0.01, "max_lr": 0.3, "step_size_up": 7},
        "ExponentialLR": {"gamma": 0.93},
        "LinearLR": {},
        "Constant": {},
        "OneCycleLR": {"max_lr": 0.3},
        "StepLR": {"step_size": 7},
    }.get(name, {"num_warmup_steps": 10})
    totals = Totals(updates=40, epochs=1, updates_per_epoch=40)
    whole = rates(name, 40, lr=0.3, totals=totals, **arguments)

    first = built(name, lr=0.3, totals=totals, **arguments)
    for _ in range(23):
        first.step()
    second = built(name, lr=0.3, totals=totals, **arguments)
    second.load_state_dict(first.state_dict())
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    group = second.optimizer.param_groups[0]
    resumed = [(float(group["lr"]), float(group["momentum"]))]
    for _ in range(17):
        second.step()
        resumed.append((float(group["lr"]), float(group["momentum"])))
    assert resumed == whole[23:]


@pytest.mark.parametrize("name", catalogue.names("schedule"))
def test_the_arguments_known_without_torch_are_those_of_the_class(name: str) -> None:
    taken = list(inspect.signature(catalogue.resolve("schedule", name)).parameters.values())[1:]
    known = catalogue.arguments("schedule", name)
    assert known is not None
    assert {each.name: each.required for each in known.values()} == {
        each.name: each.default is inspect.Parameter.empty for each in taken
    }


def test_there_are_fourteen_names() -> None:
    assert len(catalogue.names("schedule")) == 14


def test_the_length_of_the_run_is_filled_in() -> None:
    made = rates("LinearWithWarmup", 3, lr=0.1, totals=Totals(6, 2, 3), num_warmup_steps=0)
    assert made[3][0] == pytest.approx(0.05)


def test_what_is_missing_and_not_known_from_the_run_is_named() -> None:
    with pytest.raises(ValueError, match="num_warmup_steps: is required"):
        built("LinearWithWarmup")


def test_a_cycle_shorter_than_the_run_is_refused() -> None:
    with pytest.raises(InvalidSetup, match="ends after 50 steps, but the run has 60"):
        built("OneCycleLR", totals=Totals(60, 1, 60), max_lr=0.1, total_steps=50)
    with pytest.raises(InvalidSetup, match="ends after 50 steps"):
        totals = Totals(60, 1, 60)
        built("OneCycleLR", totals=totals, max_lr=0.1, epochs=5, steps_per_epoch=10)


@pytest.mark.spec("AC-139")
def test_a_polynomial_that_would_rise_is_refused() -> None:
    with pytest.raises(ValueError, match="below the optimizer's learning rate"):
        built("PolynomialDecayWithWarmup", lr=1e-8, num_warmup_steps=1)


def test_rates_of_several_groups_decay_to_the_same_end() -> None:
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (1.0, 0.1)]
    made = schedule("PolynomialDecayWithWarmup", lr_end=0.01, num_warmup_steps=0)(torch.optim.SGD(groups), LONG)
    made.optimizer.step()
    for _ in range(LONG.updates):
        made.step()
    assert made.get_last_lr() == pytest.approx([0.01, 0.01])


def test_a_schedule_per_epoch_is_filled_with_epochs() -> None:
    made = optimizer("SGD", lr=0.1)([("w", nn.Parameter(torch.zeros(1)))])
    stepped = schedule("LinearWithWarmup", per="epoch", num_warmup_steps=0)(made, Totals(600, 2, 300))
    made.step()
    stepped.step()
    assert stepped.get_last_lr() == pytest.approx([0.05])
