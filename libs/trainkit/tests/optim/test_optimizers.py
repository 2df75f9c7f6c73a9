"""Optimizers by name: the published numbers, the errors, the groups."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn
from trainkit import catalogue
from trainkit.callbacks import Callback
from trainkit.errors import InvalidSetup
from trainkit.optim import Group, optimizer, parameter_groups
from trainkit.trainer import Trainer

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


PASSED: dict[str, dict[str, Any]] = {
    "ASGD": {"lr": 0.2, "lambd": 0.3, "alpha": 0.4, "t0": 5.0, "weight_decay": 0.6},
    "Adadelta": {"lr": 0.2, "rho": 0.3, "eps": 0.4, "weight_decay": 0.5},
    "Adafactor": {
        "lr": 0.2,
        "eps": (1e-20, 1e-2),
        "clip_threshold": 2.0,
        "decay_rate": -0.7,
        "beta1": 0.3,
        "weight_decay": 0.4,
        "scale_parameter": False,
        "relative_step": False,
    },
    "Adagrad": {"lr": 0.2, "lr_decay": 0.3, "weight_decay": 0.4, "initial_accumulator_value": 0.5, "eps": 0.6},
    "Adam": {"lr": 0.2, "betas": (0.3, 0.4), "eps": 0.5, "weight_decay": 0.6, "amsgrad": True},
    "AdamW": {"lr": 0.2, "betas": (0.3, 0.4), "eps": 0.5, "weight_decay": 0.6, "amsgrad": True},
    "Adamax": {"lr": 0.2, "betas": (0.3, 0.4), "eps": 0.5, "weight_decay": 0.6},
    "NAdam": {
        "lr": 0.2,
        "betas": (0.3, 0.4),
        "eps": 0.5,
        "weight_decay": 0.6,
        "momentum_decay": 0.7,
        "decoupled_weight_decay": True,
    },
    "RAdam": {"lr": 0.2, "betas": (0.3, 0.4), "eps": 0.5, "weight_decay": 0.6, "decoupled_weight_decay": True},
    "RMSprop": {"lr": 0.2, "alpha": 0.3, "eps": 0.4, "weight_decay": 0.5, "momentum": 0.6, "centered": True},
    "Rprop": {"lr": 0.2, "etas": (0.3, 1.4), "step_sizes": (1e-5, 40.0)},
    "SGD": {"lr": 0.2, "momentum": 0.3, "weight_decay": 0.4, "nesterov": True},
    "SparseAdam": {"lr": 0.2, "betas": (0.3, 0.4), "eps": 0.5},
}
SWITCHES = ("maximize", "foreach", "differentiable", "capturable", "fused")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.spec(f"AC-{113 + at}")) for at, name in enumerate(THIRTEEN)]
)
def test_an_optimizer_gets_its_arguments_from_code_and_from_text(name: str) -> None:
    """As text, numbers are strings, as YAML 1.1 reads `1e-3`, and pairs are lists."""

    def text(value: Any) -> Any:
        return [str(each) for each in value] if isinstance(value, tuple) else str(value)

    given = PASSED[name]
    as_text = {key: value if isinstance(value, bool) else text(value) for key, value in given.items()}
    takes = inspect.signature(catalogue.resolve("optimizer", name)).parameters
    for arguments in (given, as_text):
        found = optimizer(name, **arguments)([("w", nn.Parameter(torch.zeros(1)))]).defaults
        assert {key: found[key] for key in given} == given
    # Values that differ from the defaults, or the comparison would show nothing.
    assert all(takes[key].default != value for key, value in given.items())
    for switch in (switch for switch in SWITCHES if switch in takes):
        found = optimizer(name, **{switch: True})([("w", nn.Parameter(torch.zeros(1)))]).defaults
        assert found[switch] is True


@pytest.mark.spec("AC-125")
def test_sparse_adam_moves_only_the_rows_that_were_used() -> None:
    table = nn.Embedding(4, 1, sparse=True)
    nn.init.ones_(table.weight)
    made = optimizer("SparseAdam")(list(table.named_parameters()))
    table(torch.tensor([1, 3])).sum().backward()
    made.step()
    assert table.weight.flatten().tolist() == pytest.approx([1.0, 0.999, 1.0, 0.999])


@pytest.mark.spec("AC-125")
def test_dense_gradients_are_refused_by_sparse_adam() -> None:
    with pytest.raises(RuntimeError, match="dense"):
        after_updates("SparseAdam")


@pytest.mark.spec("AC-125")
def test_sparse_gradients_are_clipped() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(4, 1, sparse=True)
            nn.init.ones_(self.table.weight)
            self.norms: list[float] = []

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            return 3 * self.table(batch).sum() + 4 * self.table(batch[:1]).sum()  # gradients 7 and 3, twice over

    class Norms(Callback):
        def on_update_start(self, fit: Any) -> None:
            gradient = fit.module.table.weight.grad
            fit.module.norms += [float(fit.grad_norm), float(gradient.to_dense().norm())]

    module, rows = Table(), torch.tensor([[1, 3]])
    trainer = Trainer(
        module=module,
        optimizer=optimizer("SparseAdam"),
        train=[rows[0]],
        max_duration="1st",
        clip_norm=0.5,
        callbacks=[Norms()],
        device="cpu",
    )
    trainer.fit()
    assert module.norms == pytest.approx([58**0.5, 0.5])
    assert module.table.weight.flatten().tolist() == pytest.approx([1.0, 0.999, 1.0, 0.999])


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        pytest.param("SGD", {"lr": -1}, marks=pytest.mark.spec("AC-124")),
        pytest.param("Adam", {"betas": [0.9, 1.0]}, marks=pytest.mark.spec("AC-117")),
        pytest.param("SGD", {"nesterov": True}, marks=pytest.mark.spec("AC-124")),
        pytest.param("SGD", {"nesterov": True, "momentum": 0.9, "dampening": 0.5}, marks=pytest.mark.spec("AC-124")),
        pytest.param("Adafactor", {"lr": 1e-3}, marks=pytest.mark.spec("AC-115")),
        pytest.param("Adafactor", {"warmup_init": True, "relative_step": False}, marks=pytest.mark.spec("AC-115")),
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
