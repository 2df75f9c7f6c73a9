"""Names to classes: what is allowed, what is refused, what is said about it."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import torch
from torch import nn
from trainkit import catalogue
from trainkit.catalogue import UnknownName, WrongArguments
from trainkit.extras import MissingExtra, require


class Mine(torch.optim.SGD):
    pass


def test_a_class_of_torch_is_had_by_its_path() -> None:
    assert catalogue.resolve("optimizer", "torch.optim.Muon") is torch.optim.Muon
    assert catalogue.resolve("module", "torch.nn.Linear") is nn.Linear


def test_arguments_of_a_class_by_path_are_checked_against_its_signature() -> None:
    with pytest.raises(WrongArguments, match=r"in_featurs: no argument.*did you mean in_features\?"):
        catalogue.build("module", "torch.nn.Linear", in_featurs=3, out_features=2)
    assert catalogue.build("module", "torch.nn.Linear", in_features=3, out_features=2).out_features == 2


@pytest.mark.parametrize(
    "path",
    [
        "os.system",
        "subprocess.Popen",
        "builtins.eval",
        "torch.hub.load",
        "torch.load",
        "torchvision.models.ResNet",
        "torch.optimistic.SGD",
        "SDG",
    ],
)
def test_what_is_not_of_a_trusted_package_is_not_even_imported(path: str) -> None:
    with pytest.raises(UnknownName, match="is not an optimizer; allowed: ASGD, Adadelta"):
        catalogue.resolve("optimizer", path)


@pytest.mark.parametrize(
    "path",
    [
        "torch.optim.adam.Tensor",  # a class, but no optimizer
        "torch.optim.adam.cast",  # a function of another module
        "torch.optim.lr_scheduler",  # a module
        "torch.optim.Optimizer.step",  # no module to import from
        "torch.optim.nothing",
        "trainkit.optim.building.catalogue",
    ],
)
def test_what_resolves_to_anything_but_a_class_of_the_kind_is_refused(path: str) -> None:
    with pytest.raises(UnknownName):
        catalogue.resolve("optimizer", path)


def test_an_alias_in_a_trusted_package_of_a_class_from_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.optim, "Alias", Mine, raising=False)
    with pytest.raises(UnknownName, match=r"is defined in .*test_catalogue, which is not trusted"):
        catalogue.resolve("optimizer", "torch.optim.Alias")


def test_a_program_names_its_own_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue.KINDS["optimizer"], "entries", dict(catalogue.KINDS["optimizer"].entries))
    catalogue.register("optimizer", Mine)
    assert catalogue.resolve("optimizer", "Mine") is Mine
    with pytest.raises(ValueError, match="already an optimizer"):
        catalogue.register("optimizer", Mine, "SGD")


def test_a_program_trusts_its_own_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue.KINDS["optimizer"], "homes", ["torch.optim"])
    with pytest.raises(UnknownName):
        catalogue.resolve("optimizer", "torch.testing._internal.common_utils.CrossRefMode")
    catalogue.trust("optimizer", "trainkit.optim")
    with pytest.raises(UnknownName, match=r"it has to be a class that derives from Optimizer"):
        catalogue.resolve("optimizer", "trainkit.optim.Group")


def test_wrong_arguments_are_named_all_at_once_with_the_nearest() -> None:
    with pytest.raises(WrongArguments) as caught:
        catalogue.build("optimizer", "AdamW", [], lrr=1, betas=0.9, wieght_decay=0, amsgrad="yes", eps="tiny")
    assert [(name, near) for name, _, _, near in caught.value.problems] == [
        ("lrr", "lr"),
        ("betas", ""),
        ("wieght_decay", "weight_decay"),
        ("amsgrad", ""),
        ("eps", ""),
    ]


def test_numbers_written_as_text_and_lists_become_what_the_class_wants() -> None:
    known = catalogue.arguments("optimizer", "AdamW")
    assert known is not None
    assert catalogue.checked("AdamW", known, {"lr": "1e-6", "betas": [0.8, "0.9"], "fused": None}) == {
        "lr": 1e-6,
        "betas": (0.8, 0.9),
        "fused": None,
    }


@pytest.mark.parametrize("kind", ["callback", "tracker"])
def test_the_arguments_known_without_torch_are_those_of_the_class(kind: str) -> None:
    for name in catalogue.names(kind):
        known = catalogue.arguments(kind, name)
        assert known is not None
        taken = inspect.signature(catalogue.resolve(kind, name)).parameters
        assert list(known) == [each for each in taken if each != "file"], name  # a file cannot hold a stream


def test_names_and_arguments_are_known_without_importing_torch() -> None:
    program = """
import sys
from trainkit import catalogue
assert catalogue.arguments("optimizer", "AdamW") and catalogue.names("schedule")
assert "torch" not in sys.modules and "numpy" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_missing_package_is_named_with_the_extra_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mlflow", "mlflow.tracking"):  # another test may have imported it
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtra, match=r"the MLflow tracker needs .*pip install 'trainkit\[mlflow\]'"):
        require("mlflow.tracking", "the MLflow tracker")
