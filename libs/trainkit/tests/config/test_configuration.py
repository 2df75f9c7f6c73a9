"""Configurations: what is read, and what is said when something is wrong."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import jsonschema
import pytest
from ruamel.yaml import YAML
from trainkit.config import Component, ConfigError, OfKind, Problem, RunConfig, from_dict, load, parse, schema
from trainkit.config.saving import save, to_dict

GOOD = """\
max_duration: 3ep
batch_size: 32
optimizer: {type: AdamW, lr: 1e-3, weight_decay: 0.05}
schedule: {type: LinearWithWarmup, num_warmup_steps: 13}
checkpoints: {every: 20st, best: {metric: val/loss}}
"""


@dataclass(frozen=True, kw_only=True)
class Layer:
    width: int
    kind: Literal["dense", "sparse"] = "dense"


@dataclass(frozen=True, kw_only=True)
class Own:
    """Settings of a program.

    Args:
        layers: from the first
            to the last.
    """

    layers: list[Layer]
    run: RunConfig | None = None
    by_name: dict[str, Layer] = field(default_factory=dict)
    size: int | str = 0
    metric: Annotated[Component, OfKind("metric")] | None = None


def problems(text: str, type_: type[Any] = RunConfig) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        parse(text, type_, "run.yaml")
    return caught.value.problems


def test_a_file_becomes_an_object_with_numbers_as_numbers() -> None:
    config = parse(GOOD, RunConfig)
    assert config.optimizer == Component("AdamW", {"lr": 0.001, "weight_decay": 0.05})
    assert (config.batch_size, config.max_duration, config.precision) == (32, "3ep", "fp32")
    assert config.checkpoints is not None and config.checkpoints.best is not None
    assert config.checkpoints.best.mode == "min"


def test_numbers_in_quotes_and_a_bare_name_are_understood() -> None:
    config = parse('{max_duration: 3ep, batch_size: "32", optimizer: SGD, clip_norm: "1e-1"}', RunConfig)
    assert (config.batch_size, config.optimizer, config.clip_norm) == (32, Component("SGD"), 0.1)


def test_everything_wrong_is_told_at_once_with_line_field_and_the_nearest_spelling() -> None:
    text = """\
max_duraton: 3ep
batch_size: many
optimizer:
  type: AdamW
  lrr: 1e-3
  betas: [0.9]
schedule: {type: LinearWithWarmpu}
precision: bf61
accumulate: 0
log_every: 3 hours
checkpoints:
  evry: 1ep
  best: {mode: min}
"""
    found = [(each.line, each.field, each.suggestion) for each in problems(text)]
    assert found == [
        (1, "max_duration", ""),
        (1, "max_duraton", "max_duration"),
        (2, "batch_size", ""),
        (5, "optimizer.lrr", "lr"),
        (6, "optimizer.betas", ""),
        (7, "schedule.type", "LinearWithWarmup"),
        (8, "precision", "bf16"),
        (9, "accumulate", ""),
        (10, "log_every", ""),
        (12, "checkpoints.evry", "every"),
        (13, "checkpoints.best.metric", ""),
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("batch_size: 0", "run.yaml:1: batch_size: is 0; allowed: a whole number at least 1"),
        ("batch_size: 1.5", "run.yaml:1: batch_size: is 1.5; allowed: a whole number at least 1"),
        ("compile: 7", "run.yaml:1: compile: is 7; allowed: true or false"),
        ("clip_norm: -1", "run.yaml:1: clip_norm: is -1; allowed: a number above 0 or null"),
        ("precision: 16", "run.yaml:1: precision: is 16; allowed: fp32, bf16, fp16"),
        (
            "optimizer: 3",
            "run.yaml:1: optimizer: is not an optimizer; allowed: a name, or {type: NAME, ARGUMENT: VALUE}",
        ),
        ("optimizer: {type: SGD, lr: fast}", "run.yaml:1: optimizer.lr: is 'fast'; allowed: a number"),
        ("batch_size: 1\nbatch_size: 2", "run.yaml:2: batch_size: was given already in line 1"),
        ("optimizer: os.system", "is not an optimizer; allowed: ASGD"),
        ("log_every: 3 hours", "'3 hours' is not a duration: write a whole number and a unit"),
        ("log_every: 10", "log_every: is 10; allowed: a text such as '10ep', '500st', '1e9tok' or null"),
        ("seed: true", "run.yaml:1: seed: is True; allowed: a whole number"),
        ("clip_norm: true", "run.yaml:1: clip_norm: is True; allowed: a number above 0 or null"),
        ("compile: 1", "run.yaml:1: compile: is 1; allowed: true or false"),
        ("deterministic: 'true'", "run.yaml:1: deterministic: is 'true'; allowed: true or false"),
        ("? [a, b]\n: 3", "run.yaml:1: has a key that is no text"),
    ],
)
def test_a_problem_says_what_is_allowed(text: str, expected: str) -> None:
    assert any(expected in str(each) for each in problems(text))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "run.yaml: is empty; allowed: a mapping of settings"),
        ("a: [1", "run.yaml:1: not YAML: "),
        ("a: b\n\tc: d", "run.yaml:2: not YAML: "),
        (
            "a: !!python/object:os.system x",
            "run.yaml:1: a: tag:yaml.org,2002:python/object:os.system 'x' is not supported",
        ),
    ],
)
def test_a_text_that_is_no_configuration_is_refused(text: str, expected: str) -> None:
    assert any(expected in str(each) for each in problems(text))


def test_a_document_that_unfolds_without_end_is_refused() -> None:
    text = "a: &a [1,1,1,1,1,1,1,1,1,1]\n" + "".join(
        f"{name}: &{name} [{','.join([f'*{before}'] * 10)}]\n" for before, name in zip("abcdef", "bcdefg", strict=True)
    )
    assert "has more than 10000 values" in str(problems(text)[0])


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.yaml: cannot be read: No such file"):
        load(tmp_path / "nothing.yaml", RunConfig)


def test_problems_within_lists_mappings_and_unions_keep_their_place() -> None:
    text = """\
layers:
  - {width: 3}
  - {widht: 3}
by_name:
  first: {width: 3, kind: dens}
size: [1]
run:
  batch_size: 1
  optimizer: SGD
  max_duration: 1ep
  sed: 3
metric: torchmetrics.MeanSquaredError
"""
    assert [(each.line, each.field, each.suggestion) for each in problems(text, Own)] == [
        (3, "layers[1].width", ""),
        (3, "layers[1].widht", "width"),
        (5, "by_name.first.kind", "dense"),
        (6, "size", ""),
        (11, "run.sed", "seed"),
    ]
    assert "a whole number or a text" in str(next(each for each in problems(text, Own) if each.field == "size"))


def test_no_value_is_bent_to_fit() -> None:
    good = "max_duration: 3ep\nbatch_size: 32\noptimizer: SGD\n"
    for wrong in (
        "seed: true",
        "clip_norm: true",
        "compile: 1",
        "deterministic: 'true'",
        "checkpoints: {keep_last: true}",
    ):
        assert [each.line for each in problems(good + wrong)] == [4]


def test_plain_data_is_checked_the_same_way() -> None:
    with pytest.raises(ConfigError, match=r"layers\[0\]\.width: is 'x'; allowed: a whole number"):
        from_dict({"layers": [{"width": "x"}]}, Own)


def test_what_is_saved_with_a_run_reads_back_equal(tmp_path: Path) -> None:
    config = parse(GOOD, RunConfig)
    file = save(config, tmp_path / "run")
    assert load(file, RunConfig) == config
    assert [each.name for each in file.parent.iterdir()] == ["config.yaml"]
    assert "precision: fp32" in file.read_text()  # defaults too
    assert file.read_text().startswith("max_duration: 3ep\n")


def test_the_schema_accepts_what_is_accepted_and_refuses_what_is_refused() -> None:
    made = schema(RunConfig)
    jsonschema.Draft202012Validator.check_schema(made)
    validator = jsonschema.Draft202012Validator(made)
    good = YAML(typ="safe").load(GOOD)
    assert list(validator.iter_errors(good)) == []
    assert list(validator.iter_errors(to_dict(parse(GOOD, RunConfig)))) == []
    for wrong in ({"sed": 1}, {"optimizer": {"type": "AdamW", "lrr": 1}}, {"optimizer": "AdmW"}, {"batch_size": 0}):
        assert list(validator.iter_errors({**good, **wrong})) != []


def test_the_schema_describes_fields_with_the_words_of_the_class() -> None:
    made = schema(Own)
    assert made["properties"]["layers"]["description"] == "from the first to the last."
    run = made["$defs"]["RunConfig"]["properties"]
    assert all(entry.get("description") for entry in run.values())


def config_command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "trainkit.config", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_command_tells_problems_and_imports_no_torch(tmp_path: Path) -> None:
    (tmp_path / "good.yaml").write_text(GOOD)
    (tmp_path / "bad.yaml").write_text(GOOD + "sed: 3\n")
    done = config_command("check", "good.yaml", "bad.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == "good.yaml: good\n"
    assert "bad.yaml:6: sed: unknown key" in done.stderr and "did you mean seed?" in done.stderr
    imported = [line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time")]
    assert "trainkit.config.checking" in imported
    assert not {"torch", "numpy", "torchmetrics", "transformers"} & set(imported)


def test_the_command_checks_a_program_s_own_settings(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\nfrom trainkit.config import RunConfig\n"
        "@dataclass(frozen=True, kw_only=True)\nclass Mine(RunConfig):\n    hidden: int = 3\n"
    )
    (tmp_path / "run.yaml").write_text(GOOD + "hidden: x\n")
    done = config_command("check", "run.yaml", "--class", "mine:Mine", cwd=tmp_path)
    assert done.returncode == 2 and "run.yaml:6: hidden: is 'x'; allowed: a whole number" in done.stderr
    assert config_command("check", "run.yaml", "--class", "mine:Other", cwd=tmp_path).returncode == 2
