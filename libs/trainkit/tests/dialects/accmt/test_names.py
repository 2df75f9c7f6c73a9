"""The names that projects import: those of the release that the dialect follows, and those of others."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from trainkit.dialects import replaced
from trainkit.dialects.__main__ import Renamed, main

from libs.trainkit.tests.dialects.accmt import release_names


def run(folder: str, script: str, arguments: list[str]) -> None:
    """`python -m trainkit.dialects run SCRIPT` in this process."""
    os.chdir(folder)
    sys.argv = ["trainkit.dialects", "run", script, *arguments]
    main()


@pytest.fixture
def unchanged(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Scripts may import `accmt`."""
    monkeypatch.setattr(sys, "meta_path", [Renamed(), *sys.meta_path])
    yield
    for name in [each for each in sys.modules if each.partition(".")[0] == "accmt"]:
        del sys.modules[name]


@pytest.mark.spec("AC-X09")
def test_every_name_of_the_release_has_its_parameters_and_defaults() -> None:
    assert release_names.TABLE["release"] == "1.9.0"
    assert sum(len(release_names.TABLE[key]) for key in ("same_as", "parameters", "members", "kind")) == 165
    assert release_names.mismatches("trainkit.dialects.accmt") == []


@pytest.mark.spec("AC-X09")
def test_a_script_imports_them_from_the_library_s_own_modules(forks: Any, tmp_path: Path) -> None:
    forks.succeed(run, tmp_path, script=release_names.__file__, arguments=[])
    assert "the same names" in (tmp_path / "rank-0.log").read_text()


@pytest.mark.spec("AC-X10")
@pytest.mark.usefixtures("unchanged")
def test_a_name_of_another_release_is_an_error_that_says_what_to_use() -> None:
    import accmt  # type: ignore[import-not-found]

    with pytest.raises(ImportError, match=r"accmt.TensorBoard is not in accmt 1\.9\.0.*log_with='mlflow'"):
        from accmt import TensorBoard  # noqa: F401
    with pytest.raises(ImportError, match=r"accmt\.callbacks\.CallbackMaster.*a list"):
        from accmt.callbacks import CallbackMaster  # noqa: F401
    with pytest.raises(ImportError, match=r"accmt\.handlers is not in accmt 1\.9\.0.*clip_grad"):
        from accmt.handlers import Handler  # noqa: F401
    with pytest.raises(ImportError, match=r"accmt\.curriculum.*sampler"):
        importlib.import_module("accmt.curriculum")
    with pytest.raises(ModuleNotFoundError, match=r"no module 'accmt\.other'"):
        importlib.import_module("accmt.other")
    assert not hasattr(accmt, "other")


@pytest.mark.spec("AC-X10")
@pytest.mark.usefixtures("unchanged")
def test_no_replaced_name_is_one_that_the_dialect_has() -> None:
    table = release_names.tomllib.loads(
        release_names.files("trainkit.dialects.accmt").joinpath("replaced.toml").read_text("utf-8")
    )
    for module in table["modules"]:
        with pytest.raises(replaced.Replaced, match=module):
            importlib.import_module(module)
    present = {path.partition(":")[2] for key in ("same_as", "parameters", "kind") for path in release_names.TABLE[key]}
    assert not present & table["names"].keys()
    import accmt

    for name in table["names"]:
        with pytest.raises(replaced.Replaced, match=name):
            getattr(accmt, name)


@pytest.mark.spec("AC-X10")
@pytest.mark.usefixtures("unchanged")
def test_a_class_keeps_its_name_when_the_module_of_the_same_name_is_imported() -> None:
    import accmt
    from accmt.tqdm import tqdm  # type: ignore[import-not-found]

    assert accmt.tqdm is tqdm and accmt.accelerator is importlib.import_module("accmt.accelerator").accelerator
