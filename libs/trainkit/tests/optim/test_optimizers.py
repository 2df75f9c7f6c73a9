"""Optimizers by name: the published numbers, the errors, the groups."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn
from trainkit import catalogue
from trainkit.errors import InvalidSetup
from trainkit.optim import Group, optimizer, parameter_groups

THIRTEEN = ["ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop"]
THIRTEEN += ["SGD", "SparseAdam"]


def after_updates(name: str, updates: int = 3, **arguments: Any) -> float:
    """theta after some updates from 1 down the bowl theta^2 / 2."""
    theta = nn.Parameter(torch.ones((), dtype=torch.float64))
    made = optimizer(name, **arguments)([("theta", theta)])
    for _ in range(updates):
        made.zero_grad()
        (theta**2 / 2).backward()
        made.step()
    return theta.item()


def row(identity: int, name: str, expected: float, updates: int = 3, **arguments: Any) -> Any:
    mark = pytest.mark.spec(f"AC-{identity}")
    return pytest.param(name, updates, arguments, expected, marks=mark, id=f"AC-{identity}-{name}-{len(arguments)}")


@pytest.mark.parametrize(
    ("name", "updates", "arguments", "expected"),
    [
        row(113, "ASGD", 0.97029608),
        row(114, "Adadelta", 0.99030908),
        row(115, "Adafactor", 0.97042323),
        row(115, "Adafactor", 0.99700126, lr=1e-3, scale_parameter=False, relative_step=False),
        row(115, "Adafactor", 0.99999400, warmup_init=True),
        row(116, "Adagrad", 0.97723794),
        row(116, "Adagrad", 0.97882988, lr_decay=0.1),
        row(117, "Adam", 0.99700010),
        row(117, "Adam", 0.99697013, weight_decay=0.01, decoupled_weight_decay=True),
        row(118, "AdamW", 0.99697013),
        row(118, "AdamW", 0.99670044, weight_decay=0.1),
        row(119, "Adamax", 0.99400039),
        row(120, "NAdam", 0.99485891),
        row(121, "RAdam", 0.99500544, updates=5),
        row(121, "RAdam", 0.99497962, updates=6),
        row(122, "RMSprop", 0.77998228),
        row(122, "RMSprop", 0.55291495, momentum=0.9),
        row(122, "RMSprop", 0.77806842, centered=True),
        row(123, "Rprop", 0.96360000),
        row(124, "SGD", 0.99700300),
        row(124, "SGD", 0.486, lr=0.1, momentum=0.9),
        row(124, "SGD", 0.327321, lr=0.1, momentum=0.9, nesterov=True),
        row(124, "SGD", 0.56808225, lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.1),
    ],
)
def test_an_optimizer_by_name_takes_the_published_steps(
    name: str, updates: int, arguments: dict[str, Any], expected: float
) -> None:
    assert after_updates(name, updates, **arguments) == pytest.approx(expected, abs=1e-8)


@pytest.mark.spec("AC-125")
def test_sparse_adam_moves_only_the_rows_that_were_used() -> None:
    table = nn.Embedding(4, 1, sparse=True)
    nn.init.ones_(table.weight)
    made = optimizer("SparseAdam")(list(table.named_parameters()))
    table(torch.tensor([1, 3])).sum().backward()
    made.step()
    assert table.weight.flatten().tolist() == pytest.approx([1.0, 0.999, 1.0, 0.999])


def test_dense_gradients_are_refused_by_sparse_adam() -> None:
    with pytest.raises(RuntimeError, match="dense"):
        after_updates("SparseAdam")


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("SGD", {"lr": -1}),
        ("Adam", {"betas": [0.9, 1.0]}),
        ("SGD", {"nesterov": True}),
        ("Adafactor", {"lr": 1e-3}),
        ("Adafactor", {"warmup_init": True, "relative_step": False}),
    ],
)
def test_values_out_of_bounds_are_refused(name: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        after_updates(name, **arguments)


def test_there_are_thirteen_names() -> None:
    assert catalogue.names("optimizer") == THIRTEEN


@pytest.mark.parametrize("name", THIRTEEN)
def test_the_arguments_known_without_torch_are_those_of_the_class(name: str) -> None:
    taken = inspect.signature(catalogue.resolve("optimizer", name)).parameters
    known = catalogue.arguments("optimizer", name)
    assert known is not None
    assert list(known) == [each for each in taken if each != "params"]
    assert not any(each.required for each in known.values())


def two_layers() -> nn.ModuleDict:
    return nn.ModuleDict({"encoder": nn.Linear(3, 2), "head": nn.Linear(2, 1)})


def test_vectors_get_no_decay_and_groups_win() -> None:
    made = optimizer("AdamW", weight_decay=0.1, groups=[Group("head.*", {"lr": 0.5})], decay_matrices_only=True)
    groups = made(list(two_layers().named_parameters())).param_groups
    assert [(group["param_names"], group["weight_decay"], group["lr"]) for group in groups] == [
        (["encoder.weight"], 0.1, 1e-3),
        (["encoder.bias"], 0.0, 1e-3),
        (["head.weight"], 0.1, 0.5),
        (["head.bias"], 0.0, 0.5),
    ]


def test_frozen_parameters_get_no_group() -> None:
    model = two_layers()
    model["encoder"].requires_grad_(False)
    (group,) = parameter_groups(model.named_parameters())
    assert [name for name, _ in group["params"]] == ["head.weight", "head.bias"]


def test_a_group_without_parameters_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(InvalidSetup, match=r"'heads\.weight'; did you mean head\.weight\?"):
        parameter_groups(two_layers().named_parameters(), [Group("heads.weight", {"lr": 1.0})])


def test_arguments_are_checked_when_the_factory_is_made() -> None:
    with pytest.raises(catalogue.WrongArguments, match=r"weight_decya.*did you mean weight_decay\?"):
        optimizer("AdamW", weight_decya=0.1)
