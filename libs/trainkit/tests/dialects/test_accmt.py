"""The rows of the ACCMT dialect, on the bowl (w-2)^2: after n updates with rate 0.1, w = 2 - 2*0.8^n, and the loss of
step k is 4*0.64^k."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler, TensorDataset
from trainkit.callbacks.weights import load_weights
from trainkit.dialects.accmt import AcceleratorModule, HyperParameters, Monitor, Optimizer, Scheduler, Trainer
from trainkit.dialects.accmt.callbacks import Callback
from trainkit.dialects.accmt.metrics import Metric, MetricParallel
from trainkit.dialects.accmt.padding import pad
from trainkit.dialects.accmt.resuming import indices

# The module returns the values of a metric that most runs here do not have.
pytestmark = pytest.mark.filterwarnings("ignore:validation_step returned")

ROWS_OF_HOOKS = [name for name in vars(Callback) if name.startswith("on_")]


class Weight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


class Bowl(AcceleratorModule):
    def __init__(self) -> None:
        super().__init__()
        self.model: Any = Weight()
        self.seen: list[tuple[Any, ...]] = []
        self.keys: list[str] = []

    def training_step(self, batch: Any) -> Tensor:
        state = self.state
        self.seen.append((state.epoch, state.train_step, state.global_step, state.is_last_training_batch))
        return ((self(batch[0]) - batch[1]) ** 2).mean()

    def validation_step(self, key: str, batch: Any) -> Any:
        self.keys.append(key)
        predicted = self(batch[0])
        return {"loss": ((predicted - batch[1]) ** 2).mean(), "accuracy": (predicted, batch[1])}

    @property
    def w(self) -> float:
        return float(self.model.w.detach())


class Rows(Metric):
    """Notes how many rows it was given, and answers from a list."""

    def __init__(self, name: str = "accuracy", answers: Any = (), **options: Any) -> None:
        super().__init__(name, **options)
        self.rows: list[int] = []
        self.answers = list(answers)

    def compute(self, predicted: Tensor, wanted: Tensor) -> dict[str, float]:
        self.rows.append(len(predicted))
        return {self.main_metric: self.answers.pop(0) if self.answers else 0.5, "other": 0.25}


class Noted(Callback):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.given: dict[str, list[Any]] = {}


def _note(hook: str) -> Any:
    def call(self: Noted, *given: Any) -> None:
        self.calls.append(hook)
        self.given.setdefault(hook, []).append(
            given[0].detach().clone() if given and hook == "on_before_backward" else given
        )

    return call


for _hook in ROWS_OF_HOOKS:
    setattr(Noted, _hook, _note(_hook))


def bowls(samples: int) -> TensorDataset:
    return TensorDataset(torch.ones(samples), torch.full((samples,), 2.0))


def hps(**changes: Any) -> HyperParameters:
    return HyperParameters(**{"epochs": 2, "batch_size": 8, "optim_kwargs": {"lr": 0.1}, **changes})


def trainer(folder: Path, numbers: Any = None, **options: Any) -> Trainer:
    settings: dict[str, Any] = {"clip_grad": None, "dataloader_num_workers": 0, **options}
    return Trainer(numbers or hps(), folder, **settings)


def fitted(folder: Path, numbers: Any = None, *, module: Any = None, train: Any = None, val: Any = ..., **options: Any):
    made, module = trainer(folder, numbers, **options), module or Bowl()
    made.fit(module, train or bowls(96), bowls(32) if val is ... else val)
    return made, module


def logged(folder: Path, name: str) -> dict[int, float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row[name] for row in rows if name in row}


PARAMETERS = (
    "hps_config model_path track_name=None enable_checkpointing=True multiple_checkpoints=False max_checkpoints=None "
    "resume=None disable_model_saving=False patience=None evaluate_every_n_steps=None checkpoint_every='epoch' "
    "logging_dir='logs' log_with=None log_every=-1 grad_accumulation_steps=None gradient_checkpointing=False "
    "gradient_checkpointing_kwargs=None clip_grad=1.0 set_to_none=True shuffle_train=True sampler=None collate_fn=None "
    "collate_fn_train=None collate_fn_val=None max_shard_size='10GB' safe_serialization=False compile=False "
    "compile_kwargs=None safe_mode=True train_loss_metric_name='train_loss' val_loss_metric_name='val_loss' "
    "dataloader_pin_memory=True dataloader_num_workers=None dataloader_drop_last=False eval_when_finish=True "
    "eval_when_start=False monitor=None metrics=None cleanup_cache_every_n_steps=None callback=None "
    "additional_tracker_config=None batch_device_placement=True prepare_batch=True safe_steps=True "
    "destroy_after_training=True enable_prepare_logging=False"
)


@pytest.mark.spec("AC-001")
def test_the_trainer_has_the_documented_parameters_and_writes_nothing_when_made(tmp_path: Path) -> None:
    parameters = list(inspect.signature(Trainer).parameters.values())
    found = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters[:-1]]
    assert found == PARAMETERS.split()
    assert parameters[-1].kind is inspect.Parameter.VAR_KEYWORD
    Trainer(hps(), tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.spec("AC-002")
def test_hyperparameters_are_given_in_three_ways(tmp_path: Path) -> None:
    file = tmp_path / "hps.yaml"
    file.write_text("hps:\n  epochs: 2\n  batch_size: 8\n  optim: {type: SGD, lr: 1e-1}\n")
    mapping = {"epochs": 2, "batch_size": 8, "optimizer": "SGD", "optim_kwargs": {"lr": 0.1}}
    ways = [hps(), mapping, str(file)]
    ends = {fitted(tmp_path / str(at), way)[1].w for at, way in enumerate(ways)}
    assert len(ends) == 1
    with pytest.raises(FileNotFoundError):
        trainer(tmp_path / "none", str(tmp_path / "no.yaml"))


@pytest.mark.spec("AC-111")
@pytest.mark.spec("X-01")
def test_both_forms_of_a_file_are_equal_and_unknown_keys_are_named_with_their_line(tmp_path: Path) -> None:
    nested, flat = tmp_path / "nested.yaml", tmp_path / "flat.yaml"
    nested.write_text(
        "hps:\n  epochs: 3\n  batch_size: [32, 64]\n  optim: {type: AdamW, lr: 1e-3}\n"
        "  scheduler: {type: LinearWithWarmup, num_warmup_steps: 13}\n"
    )
    flat.write_text(
        "epochs: 3\nbatch_size: [32, 64]\noptimizer: AdamW\noptim_kwargs: {lr: 1e-3}\n"
        "scheduler: LinearWithWarmup\nscheduler_kwargs: {num_warmup_steps: 13}\n"
    )
    one, other = HyperParameters.of(str(nested)), HyperParameters.of(str(flat))
    assert one == other and one.batch_size == (32, 64)
    made = one.make_optimizer()([("w", nn.Parameter(torch.zeros(1)))])
    assert made.param_groups[0]["lr"] == 0.001
    flat.write_text("epochs: 3\nepoch: 4\n")
    with pytest.raises(ValueError, match=r"flat.yaml:2.*epoch.*did you mean epochs"):
        HyperParameters.of(str(flat))


@pytest.mark.spec("AC-110")
def test_max_steps_end_a_run_within_an_epoch_and_wrong_numbers_are_refused(tmp_path: Path) -> None:
    made, module = fitted(tmp_path, hps(max_steps=30, batch_size=(8, 16)))
    assert (made.state.global_step, made.state.epoch, made.state.train_step) == (30, 2, 5)
    assert len(module.keys) == 2 * made.state.evaluations_done
    for wrong in ({"epochs": 0}, {"batch_size": (1, 2, 3)}, {"epochs": None}, {"optim_kwargs": {"learning": 1}}):
        with pytest.raises(ValueError):
            hps(**wrong)
    assert list(Optimizer) and list(Scheduler)


@pytest.mark.spec("AC-003")
@pytest.mark.spec("AC-005")
@pytest.mark.spec("AC-064")
def test_a_run_ends_where_the_formula_says_and_leaves_a_model_and_a_checkpoint(tmp_path: Path) -> None:
    made, module = fitted(tmp_path / "new" / "run")
    assert module.w == pytest.approx(2 - 2 * 0.8**24, abs=1e-6)
    assert (made.state.epoch, made.state.global_step, made.state.finished) == (1, 24, True)
    saved = tmp_path / "new" / "run" / "best_valid_loss"
    assert float(load_weights(saved)["w"]) == module.w
    assert json.loads((saved / "best.json").read_text())["step"] == 24
    assert len(indices(tmp_path / "new" / "run" / "checkpoints")) == 1
    with pytest.raises(TypeError):
        trainer(tmp_path).fit(Bowl(), bowls(8), num_labels=3)


@pytest.mark.spec("AC-004")
def test_the_name_of_the_work_is_the_last_part_of_its_folder() -> None:
    assert trainer(Path("runs/digits/")).track_name == "digits"
    assert Trainer(hps(), "runs/digits/").track_name == "digits"
    assert Trainer(hps(), "runs/digits", track_name="other").track_name == "other"


class Own(Bowl):
    def get_train_dataloader(self, dataset: Any) -> Any:
        return DataLoader(bowls(40) if dataset is None else dataset, batch_size=8 if dataset is None else 3)


@pytest.mark.spec("AC-007")
@pytest.mark.spec("AC-008")
@pytest.mark.spec("AC-080")
def test_a_module_brings_its_own_loader(tmp_path: Path) -> None:
    made = trainer(tmp_path / "a", hps(epochs=1))
    made.fit(Own())
    assert made.state.global_step == 5
    assert logged(tmp_path / "a", "val_loss") == {}
    assert (tmp_path / "a" / "best_train_loss").is_dir() and not (tmp_path / "a" / "best_valid_loss").exists()
    made, _ = fitted(tmp_path / "b", hps(epochs=1), module=Own())
    assert made.state.global_step == 32
    with pytest.raises(ValueError, match="no training data"):
        trainer(tmp_path / "c").fit(Bowl())


@pytest.mark.spec("AC-011")
def test_compiling_changes_neither_the_result_nor_the_names_of_weights(tmp_path: Path) -> None:
    _, plain = fitted(tmp_path / "plain", hps(epochs=1))
    _, compiled = fitted(tmp_path / "compiled", hps(epochs=1), compile=True, compile_kwargs={"backend": "eager"})
    assert plain.w == compiled.w
    names = [set(load_weights(tmp_path / name / "best_valid_loss")) for name in ("plain", "compiled")]
    assert names[0] == names[1] == {"w"}


def test_a_misspelled_parameter_is_named_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"log_evry.*did you mean log_every"):
        trainer(tmp_path, log_evry=3)


class Numbers(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return torch.ones(()), torch.full((), 2.0), index


class Ordered(Bowl):
    def __init__(self) -> None:
        super().__init__()
        self.order: list[int] = []

    def training_step(self, batch: Any) -> Tensor:
        self.order += batch[2].tolist()
        return super().training_step(batch)


@pytest.mark.spec("AC-014")
def test_every_epoch_has_its_own_order_and_every_run_the_same(tmp_path: Path) -> None:
    orders = [fitted(tmp_path / str(at), module=Ordered(), train=Numbers())[1].order for at in range(2)]
    first, second = orders[0][:96], orders[0][96:]
    assert orders[0] == orders[1] and first != second
    assert sorted(first) == sorted(second) == list(range(96))
    _, plain = fitted(tmp_path / "p", hps(epochs=1), module=Ordered(), train=Numbers(), shuffle_train=False)
    assert plain.order == list(range(96))


@pytest.mark.spec("AC-015")
def test_samplers_are_taken_one_after_the_other(tmp_path: Path) -> None:
    samplers = [SubsetRandomSampler(range(10)), SubsetRandomSampler(range(50, 70))]
    _, module = fitted(tmp_path, hps(epochs=1), module=Ordered(), train=Numbers(), sampler=samplers)
    assert sorted(module.order[:10]) == list(range(10)) and sorted(module.order[10:]) == list(range(50, 70))


@pytest.mark.spec("AC-016")
def test_collate_functions_serve_one_loader_or_both(tmp_path: Path) -> None:
    calls = {"train": 0, "val": 0}

    def spy(name: str) -> Any:
        def collate(samples: Any) -> Any:
            calls[name] += 1
            return torch.utils.data.default_collate(samples)

        return collate

    fitted(tmp_path, hps(epochs=1), collate_fn_train=spy("train"), collate_fn_val=spy("val"))
    assert calls == {"train": 12, "val": 4}
    with pytest.raises(ValueError, match="collate_fn"):
        trainer(tmp_path, collate_fn=spy("train"), collate_fn_train=spy("train"))


@pytest.mark.spec("AC-019")
def test_only_training_drops_an_incomplete_batch(tmp_path: Path) -> None:
    for drop, steps in ((False, 13), (True, 12)):
        rows = Rows()
        made, _ = fitted(
            tmp_path / str(drop),
            hps(epochs=1),
            train=bowls(100),
            val=bowls(33),
            metrics=rows,
            dataloader_drop_last=drop,
        )
        assert made.state.global_step == steps and rows.rows == [33]


@pytest.mark.spec("AC-023")
def test_a_step_goes_backward_and_updates(tmp_path: Path) -> None:
    assert fitted(tmp_path / "1", hps(max_steps=1))[1].w == pytest.approx(0.4)
    assert fitted(tmp_path / "2", hps(max_steps=2))[1].w == pytest.approx(0.72)

    class Detached(Bowl):
        def training_step(self, batch: Any) -> Tensor:
            return super().training_step(batch).detach()

    with pytest.raises(TypeError, match="training_step"):
        fitted(tmp_path / "3", module=Detached())


@pytest.mark.spec("AC-024")
def test_accumulated_steps_make_one_update_and_leftover_ones_too(tmp_path: Path) -> None:
    for accumulate in (4, 5):
        noted = Noted()
        options: dict[str, Any] = {"grad_accumulation_steps": accumulate, "callback": noted}
        _, module = fitted(tmp_path / str(accumulate), hps(epochs=1), **options)
        assert module.w == pytest.approx(0.976, abs=1e-6)
        assert noted.calls.count("on_after_optimizer_step") == 3
    with pytest.raises(ValueError, match="grad_accumulation_steps"):
        trainer(tmp_path, grad_accumulation_steps=0)


@pytest.mark.spec("AC-025")
def test_gradients_are_clipped_at_one_unless_told_otherwise(tmp_path: Path) -> None:
    made = Trainer(hps(max_steps=1), tmp_path, dataloader_num_workers=0)
    module = Bowl()
    made.fit(module, bowls(96))
    assert module.w == pytest.approx(0.1)

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


def test_gradient_checkpointing_is_asked_of_the_model(tmp_path: Path) -> None:
    asked: list[Any] = []
    module = Bowl()
    module.model.gradient_checkpointing_enable = lambda gradient_checkpointing_kwargs: asked.append(
        gradient_checkpointing_kwargs
    )
    fitted(tmp_path / "a", hps(max_steps=1), module=module, gradient_checkpointing=True)
    assert asked == [None]
    with pytest.raises(ValueError, match="gradient_checkpointing_enable"):
        fitted(tmp_path / "b", gradient_checkpointing=True)


@pytest.mark.spec("AC-033")
def test_evaluation_is_without_dropout_and_without_gradients(tmp_path: Path) -> None:
    class Dropped(Bowl):
        def __init__(self) -> None:
            super().__init__()
            self.model.drop, self.losses = nn.Dropout(0.5), list[Tensor]()

        def forward(self, x: Tensor) -> Tensor:
            return self.model.drop(self.model(x) + 1)

        def validation_step(self, key: str, batch: Any) -> Any:
            self.losses.append(((self(batch[0]) - batch[1]) ** 2).mean())
            return self.losses[-1]

    _, module = fitted(tmp_path, hps(epochs=1, optim_kwargs={"lr": 0.0}), module=Dropped(), eval_when_start=True)
    assert len({float(each) for each in module.losses}) == 1 and not module.losses[0].requires_grad
    assert module.model.drop.training


@pytest.mark.spec("AC-034")
@pytest.mark.spec("AC-035")
@pytest.mark.spec("AC-036")
@pytest.mark.spec("AC-037")
def test_evaluations_come_when_they_are_due(tmp_path: Path) -> None:
    fitted(tmp_path / "epochs", eval_when_start=True)
    losses = logged(tmp_path / "epochs", "val_loss")
    assert losses == {0: 4.0, 12: pytest.approx(0.0188895, abs=1e-6), 24: pytest.approx(8.92e-5, abs=1e-6)}
    for every, last, steps in ((5, True, [5, 10, 15, 20, 24]), (5, False, [5, 10, 15, 20]), (6, True, [6, 12, 18, 24])):
        folder = tmp_path / f"{every}-{last}"
        made, _ = fitted(folder, evaluate_every_n_steps=every, eval_when_finish=last)
        assert list(logged(folder, "val_loss")) == steps and made.state.evaluations_done == len(steps)

    class Given(Bowl):
        def validation_step(self, key: str, batch: Any) -> Any:
            return batch[0].mean()

    short = TensorDataset(torch.tensor([1.0] * 8 + [3.0] * 2))
    fitted(tmp_path / "short", hps(epochs=1), module=Given(), val=short)
    assert logged(tmp_path / "short", "val_loss") == {12: pytest.approx(1.4)}
    with pytest.raises(ValueError, match="evaluate_every_n_steps"):
        trainer(tmp_path, evaluate_every_n_steps=0)


@pytest.mark.spec("AC-038")
@pytest.mark.spec("AC-077")
@pytest.mark.spec("AC-039")
def test_several_datasets_have_their_own_names_and_metrics(tmp_path: Path) -> None:
    one, two = Rows(), Rows("second")

    class Two(Bowl):
        def validation_step(self, key: str, batch: Any) -> Any:
            output = super().validation_step(key, batch)
            return {**output, "second": output["accuracy"]} if key == "b" else output

    sets = {"a": bowls(32), "b": bowls(16)}
    _, module = fitted(tmp_path / "d", module=Two(), val=sets, metrics={"a": one, "b": [one, two]})
    for name in ("val_loss_a", "val_loss_b", "accuracy_a", "accuracy_b", "second_b"):
        assert list(logged(tmp_path / "d", name)) == [12, 24]
    assert module.keys == (["a"] * 4 + ["b"] * 2) * 2
    assert two.rows == [16, 16]
    fitted(tmp_path / "l", hps(epochs=1), val=list(sets.values()), metrics=Rows())
    assert list(logged(tmp_path / "l", "accuracy_1")) == [12]
    with pytest.raises(KeyError, match=r"second.*'0'"):
        fitted(tmp_path / "x", metrics=[Rows(), Rows("second")])
    with pytest.raises(ValueError, match="'c'"):
        fitted(tmp_path / "y", val=sets, metrics={"c": Rows()})


@pytest.mark.spec("AC-044")
@pytest.mark.spec("AC-045")
def test_the_training_loss_is_logged_as_a_mean_at_its_cadence(tmp_path: Path) -> None:
    fitted(tmp_path / "epoch")
    assert logged(tmp_path / "epoch", "train_loss")[12] == pytest.approx(0.921553, abs=1e-5)
    fitted(tmp_path / "steps", log_every=3, grad_accumulation_steps=2, train_loss_metric_name="tl")
    assert list(logged(tmp_path / "steps", "tl")) == [6, 12, 18, 24]
    assert logged(tmp_path / "steps", "train_loss") == {}
    with pytest.raises(ValueError, match="log_every"):
        trainer(tmp_path, log_every=0)


@pytest.mark.spec("AC-048")
@pytest.mark.spec("AC-049")
@pytest.mark.spec("AC-051")
@pytest.mark.spec("AC-052")
@pytest.mark.spec("AC-055")
def test_the_monitor_switches_series(tmp_path: Path) -> None:
    fitted(tmp_path / "default", metrics=Rows())
    rows = [json.loads(line) for line in (tmp_path / "default" / "metrics.jsonl").read_text().splitlines()]
    series = {name for row in rows for name in row} - {"step", "time"}
    assert series == {"epoch", "train_loss", "val_loss", "accuracy", "other"}
    assert logged(tmp_path / "default", "epoch") == {12: 0, 24: 1}
    fitted(tmp_path / "other", monitor={"validation_loss": False, "checkpoint": True})
    assert logged(tmp_path / "other", "val_loss") == {} and (tmp_path / "other" / "best_valid_loss").is_dir()
    assert logged(tmp_path / "other", "checkpoint") == {12: 1, 24: 2}
    assert Monitor.of({"learning_rate": True}) == Monitor(learning_rate=True)
    with pytest.raises(ValueError, match=r"learning_rat.*did you mean"):
        trainer(tmp_path, monitor={"learning_rat": True})


@pytest.mark.spec("AC-050")
@pytest.mark.spec("AC-053")
def test_the_monitor_shows_rate_and_norm(tmp_path: Path) -> None:
    numbers = hps(scheduler="StepLR", scheduler_kwargs={"step_size": 1, "gamma": 0.5}, step_scheduler_per_epoch=True)
    monitor = Monitor(learning_rate=True, grad_norm=True)
    fitted(tmp_path / "a", numbers, monitor=monitor)
    assert logged(tmp_path / "a", "learning_rate") == {12: 0.1, 24: 0.05}
    fitted(tmp_path / "b", monitor=monitor, log_every=1)
    assert logged(tmp_path / "b", "grad_norm")[1] == 4.0


@pytest.mark.spec("AC-057")
@pytest.mark.spec("AC-058")
@pytest.mark.spec("AC-060")
def test_checkpoints_are_made_and_kept_as_asked(tmp_path: Path) -> None:
    for at, off in enumerate(({"enable_checkpointing": False}, {"checkpoint_every": None})):
        made, _ = fitted(tmp_path / f"off-{at}", **off)
        assert made.state.num_checkpoints_made == 0 and not (tmp_path / f"off-{at}" / "checkpoints").exists()
    cases: list[tuple[dict[str, Any], dict[int, int]]] = [
        ({}, {3: 20}),
        ({"multiple_checkpoints": True}, {0: 5, 1: 10, 2: 15, 3: 20}),
        ({"multiple_checkpoints": True, "max_checkpoints": 2}, {2: 15, 3: 20}),
    ]
    for at, (options, kept) in enumerate(cases):
        fitted(tmp_path / str(at), checkpoint_every="5st", **options)
        found = indices(tmp_path / str(at) / "checkpoints")
        assert {index: int(path.name.removeprefix("step-")) for index, path in found.items()} == kept
    for text in ("epoch", "ep", "1epoch", "1ep", "1 ep", "2eps", "3steps", "3st", "4 evals"):
        trainer(tmp_path, checkpoint_every=text)
    for text in ("2 hours", "0ep", "-1ep", "1.5ep"):
        with pytest.raises(ValueError):
            trainer(tmp_path, checkpoint_every=text)


class Stop(Exception):
    pass


class StopsAt(Noted):
    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def on_before_training_step(self, batch: Any) -> None:
        assert self.state is not None
        if self.state.global_step == self.step:
            raise Stop


@pytest.mark.spec("AC-061")
def test_a_run_that_was_cut_off_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    options: dict[str, Any] = {"checkpoint_every": "5st", "multiple_checkpoints": True, "log_every": 1}
    numbers = hps(optim_kwargs={"lr": 0.01, "momentum": 0.9})
    _, whole = fitted(tmp_path / "whole", numbers, module=Ordered(), train=Numbers(), **options)
    with pytest.raises(Stop):
        fitted(tmp_path / "cut", numbers, module=Ordered(), train=Numbers(), callback=StopsAt(17), **options)
    noted = Noted()
    made, rest = fitted(tmp_path / "cut", numbers, module=Ordered(), train=Numbers(), callback=noted, **options)
    assert rest.seen[0][2] == 15 and made.state.global_step == 24
    assert rest.w == whole.w and rest.order == whole.order[15 * 8 :]
    for name in ("train_loss", "val_loss", "epoch"):
        assert logged(tmp_path / "cut", name) == logged(tmp_path / "whole", name)
    assert noted.calls.count("on_resume") == 1 and made.state.num_checkpoints_made == 4

    made, module = fitted(tmp_path / "cut", numbers, module=Ordered(), train=Numbers(), resume=1, **options)
    assert module.seen[0][2] == 10 and module.w == whole.w
    made, module = fitted(tmp_path / "cut", numbers, module=Ordered(), train=Numbers(), resume=False, **options)
    assert module.seen[0][2] == 0 and (tmp_path / "cut" / "checkpoints-1").is_dir()
    with pytest.raises(IndexError, match="7"):
        fitted(tmp_path / "cut", numbers, resume=7, **options)
    with pytest.raises(FileNotFoundError):
        fitted(tmp_path / "nothing", resume=True)


@pytest.mark.spec("AC-063")
def test_a_finished_run_goes_on_only_for_more_epochs(tmp_path: Path) -> None:
    fitted(tmp_path)
    _, module = fitted(tmp_path)
    assert module.seen == []
    made, module = fitted(tmp_path, hps(epochs=3))
    assert len(module.seen) == 12 and made.state.global_step == 36


@pytest.mark.spec("AC-065")
def test_no_model_is_saved_when_that_is_switched_off(tmp_path: Path) -> None:
    made, _ = fitted(tmp_path, disable_model_saving=True)
    assert not (tmp_path / "best_valid_loss").exists()
    assert made.state.model_savings["best_valid_loss"] == pytest.approx(8.92e-5, abs=1e-6)


@pytest.mark.spec("AC-066")
@pytest.mark.spec("AC-067")
@pytest.mark.spec("AC-102")
def test_rules_save_when_their_groups_gain(tmp_path: Path) -> None:
    saved: dict[str, list[int]] = {}

    class Watch(Callback):
        def on_evaluation_end(self) -> None:
            assert self.state is not None
            for folder in tmp_path.glob("best_*"):
                step = json.loads((folder / "best.json").read_text())["step"]
                if step not in saved.setdefault(folder.name, []):
                    saved[folder.name].append(step)

    answers = [0.6, 0.8, 0.7, 0.6, 0.7, 0.9]
    made = trainer(tmp_path, hps(epochs=3), metrics=Rows(answers=answers, main_metric="f1"), callback=Watch())
    for rule in ("accuracy", "best_accuracy@a", "best_accuracy@a/accuracy@b"):
        made.register_model_saving(rule)
    with pytest.raises(ValueError, match="registered"):
        made.register_model_saving("best_accuracy")
    made.fit(Bowl(), bowls(96), {"a": bowls(32), "b": bowls(16)})
    assert saved["best_accuracy"] == [12, 36]
    assert saved["best_accuracy@a"] == [12, 24]
    assert saved["best_accuracy@a__accuracy@b"] == [12, 36]
    assert logged(tmp_path, "f1_a") == {12: 0.6, 24: 0.7, 36: 0.7} and 12 in logged(tmp_path, "other_a")
    wrong = trainer(tmp_path / "wrong")
    wrong.register_model_saving("acuracy")
    with pytest.raises(ValueError, match="acuracy"):
        wrong.fit(Bowl(), bowls(96), bowls(32))


@pytest.mark.spec("AC-068")
def test_a_bound_holds_savings_back(tmp_path: Path) -> None:
    made = trainer(tmp_path, hps(epochs=1))
    made.register_model_saving("best_valid_loss", saving_below=0.01)
    made.fit(Bowl(), bowls(96), bowls(32))
    assert not (tmp_path / "best_valid_loss").exists()
    made = trainer(tmp_path)
    made.register_model_saving("best_valid_loss", saving_below=0.01)
    made.fit(Bowl(), bowls(96), bowls(32))
    assert json.loads((tmp_path / "best_valid_loss" / "best.json").read_text())["values"] == [
        pytest.approx(8.92e-5, abs=1e-6)
    ]
    with pytest.raises(ValueError):
        made = trainer(tmp_path)
        made.register_model_saving("valid_loss", saving_below=0.1, saving_above=0.2)


@pytest.mark.spec("AC-072")
def test_patience_ends_a_run_after_chances_without_a_gain(tmp_path: Path) -> None:
    left: list[int] = []

    class Watch(Callback):
        def on_evaluation_end(self) -> None:
            assert self.state is not None
            left.append(self.state.patience_left["best_valid_loss"])

    class Scripted(Bowl):
        def validation_step(self, key: str, batch: Any) -> Any:
            return torch.tensor([1.0, 0.9, 0.95, 0.96, 0.5][self.state.evaluations_done])

    made, _ = fitted(tmp_path, hps(epochs=9), module=Scripted(), patience={"best_val_loss": 2}, callback=Watch())
    assert left == [2, 2, 1, 0] and made.state.evaluations_done == 4
    with pytest.raises(ValueError, match="best_f1"):
        fitted(tmp_path / "x", patience={"best_f1": 2})


@pytest.mark.spec("AC-073")
@pytest.mark.spec("AC-078")
@pytest.mark.spec("AC-079")
def test_only_what_is_not_frozen_in_the_model_is_trained(tmp_path: Path) -> None:
    class Counted(torch.optim.SGD):
        steps = 0

        def step(self, closure: Any = None) -> Any:
            Counted.steps += 1
            return super().step(closure)

    class Taught(Bowl):
        def __init__(self) -> None:
            super().__init__()
            self.teacher, self.model.fixed = nn.Linear(1, 1), nn.Linear(1, 1)
            self.freeze(self.model.fixed)

        def get_optimizer(self) -> Any:
            return Counted([("w", self.model.w)], lr=0.1)

    module = Taught()
    before = [each.clone() for part in (module.teacher, module.model.fixed) for each in part.parameters()]
    fitted(tmp_path, module=module)
    after = [each for part in (module.teacher, module.model.fixed) for each in part.parameters()]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert Counted.steps == 24 and module.w == pytest.approx(1.990555, abs=1e-5)
    assert set(load_weights(tmp_path / "best_valid_loss")) == {"w", "fixed.weight", "fixed.bias"}
    module.unfreeze(module.model.fixed)
    assert all(each.requires_grad for each in module.model.fixed.parameters())
    with pytest.raises(ValueError, match="model"):
        trainer(tmp_path).fit(type("Empty", (AcceleratorModule,), {})(), bowls(8))


@pytest.mark.spec("AC-074")
@pytest.mark.spec("AC-075")
@pytest.mark.spec("AC-076")
def test_a_module_calls_its_model_and_counts_its_parameters(tmp_path: Path) -> None:
    module = AcceleratorModule()
    module.model = nn.Linear(3, 2)
    x = torch.randn(4, 3)
    assert torch.equal(module(x), module.model(x)) and len(module) == 8
    module.model = nn.Identity()
    assert module
    with pytest.raises(ValueError, match="training_step"):
        trainer(tmp_path).fit(module, bowls(8))


@pytest.mark.spec("AC-081")
@pytest.mark.spec("AC-087")
def test_the_state_says_how_far_a_run_is(tmp_path: Path) -> None:
    made, module = fitted(tmp_path)
    assert [seen[1] for seen in module.seen] == [*range(12), *range(12)]
    assert module.seen[15] == (1, 3, 15, False)
    assert [seen[1] for seen in module.seen if seen[3]] == [11, 11]
    state = made.state
    assert (state.evaluations_done, state.num_checkpoints_made, state.is_last_epoch) == (2, 2, True)
    assert state.best_train_loss == pytest.approx(0.00435, abs=1e-5)
    assert json.loads(state.to_json())["best_valid_loss"] == pytest.approx(8.92e-5, abs=1e-6)


@pytest.mark.spec("AC-082")
def test_tensors_are_padded_to_one_length() -> None:
    rows = [torch.tensor([1, 2]), torch.tensor([3, 4, 5])]
    assert [each.tolist() for each in pad(rows, 0)] == [[1, 2, 0], [3, 4, 5]]
    assert [each.tolist() for each in pad(tuple(rows), 0, side="left")] == [[0, 1, 2], [3, 4, 5]]
    assert pad(rows, 0, op="stack").shape == (2, 3)
    assert [each.shape for each in pad([torch.ones(2, 2), torch.ones(2, 4)], 0)] == [(2, 4), (2, 4)]
    assert pad(rows[0], 0, max_length=4).tolist() == [1, 2, 0, 0]
    wrong: list[dict[str, Any]] = [
        {"tensor": rows[0], "padding": "longest"},
        {"tensor": rows[0]},
        {"tensor": rows[1], "max_length": 2},
        {"tensor": rows[0], "max_length": 4, "op": "stack"},
        {"tensor": rows, "side": "up"},
    ]
    for given in wrong:
        with pytest.raises(ValueError):
            pad(value=0, **given)


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
    fitted(tmp_path / "sets", val={"a": bowls(32), "b": bowls(16)}, callback=noted, grad_accumulation_steps=4)
    assert noted.calls.count("on_evaluation_end") == 2 and noted.calls.count("on_before_validation_step") == 12
    assert float(noted.given["on_before_backward"][0]) == 4.0
    noted = Noted()
    fitted(tmp_path, hps(epochs=3), callback=noted)
    assert noted.calls.count("on_resume") == 1


@pytest.mark.spec("AC-094")
@pytest.mark.spec("AC-095")
@pytest.mark.spec("AC-096")
def test_hooks_around_an_update(tmp_path: Path) -> None:
    gradients: list[bool] = []

    class Watch(Noted):
        def on_before_zero_grad(self, optimizer: Any) -> None:
            gradients.append(optimizer.param_groups[0]["params"][0].grad is not None)

        on_after_zero_grad = on_before_zero_grad

    scheduled = {"scheduler": "Constant"}
    cases = (
        (hps(), 4, 6, 0),
        (hps(**scheduled), 1, 24, 24),
        (hps(**scheduled, step_scheduler_per_epoch=True), 1, 24, 2),
    )
    for at, (numbers, accumulate, updates, schedules) in enumerate(cases):
        watch = Watch()
        gradients.clear()
        fitted(tmp_path / str(at), numbers, callback=watch, grad_accumulation_steps=accumulate)
        for when in ("before", "after"):
            assert watch.calls.count(f"on_{when}_optimizer_step") == updates
            assert watch.calls.count(f"on_{when}_scheduler_step") == schedules
        assert gradients == [True, False] * updates


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

    noted = Noted()
    with pytest.raises(type(error)):
        fitted(tmp_path, module=Raises(), callback=noted, safe_steps=False)
    assert [call for call in noted.calls if call in ROWS_OF_HOOKS[-4:]] == [hook]
    assert "on_fit_end" not in noted.calls


@pytest.mark.spec("AC-103")
@pytest.mark.spec("AC-104")
def test_metrics_check_shapes_and_cast(tmp_path: Path) -> None:
    class Uneven(Bowl):
        def validation_step(self, key: str, batch: Any) -> Any:
            rows = batch[0].bfloat16()
            return {"loss": rows.mean(), "accuracy": (rows, batch[1][:-1])}

    class Types(Rows):
        def compute(self, predicted: Tensor, wanted: Tensor) -> dict[str, float]:
            self.given = (predicted.dtype, len(predicted), len(wanted))
            return {"accuracy": 1.0}

    with pytest.raises(ValueError, match=r"accuracy.*batch 0"):
        fitted(tmp_path / "checked", module=Uneven(), metrics=Rows())
    for cast, found in ((torch.float32, torch.float32), (None, torch.bfloat16), ("float16", torch.float16)):
        metric = Types(do_checks=False, cast=cast)
        fitted(tmp_path / str(cast), hps(max_steps=12), module=Uneven(), metrics=metric)
        assert metric.given == (found, 32, 28)
    with pytest.raises(ValueError, match="float23"):
        Rows(cast="float23")


@pytest.mark.spec("AC-112")
@pytest.mark.spec("X-02")
def test_a_schedule_is_told_how_long_the_run_is(tmp_path: Path) -> None:
    numbers = {"scheduler": "LinearWithWarmup", "scheduler_kwargs": {"num_warmup_steps": 0}}
    rates: list[float] = []

    class Watch(Callback):
        def on_after_scheduler_step(self, scheduler: Any) -> None:
            rates.append(scheduler.get_last_lr()[0])

    fitted(tmp_path / "a", hps(**numbers), grad_accumulation_steps=4, callback=Watch())
    assert len(rates) == 6 and rates[2] == pytest.approx(0.05)
    rates.clear()
    fitted(tmp_path / "b", hps(**numbers, max_steps=30), grad_accumulation_steps=5, callback=Watch())
    assert len(rates) == 8 and rates[-1] == 0
    with pytest.raises(ValueError, match="OneCycleLR"):
        fitted(tmp_path / "c", hps(scheduler="OneCycleLR", scheduler_kwargs={"max_lr": 0.1, "total_steps": 5}))


# Two processes


class Counts(Metric):
    def compute(self, predicted: Tensor, wanted: Tensor) -> dict[str, float]:
        import torch.distributed as dist

        assert dist.get_rank() == 0
        return {"accuracy": float(len(predicted))}


class Mine(MetricParallel):
    def compute(self, predicted: Tensor, wanted: Tensor) -> dict[str, float]:
        import torch.distributed as dist

        return {"mine": 1.0 - 0.5 * dist.get_rank()}


class OnTwo(Bowl):
    def training_step(self, batch: Any) -> Tensor:
        import torch.distributed as dist

        rank = dist.get_rank()
        values = {"rank": torch.tensor(rank + 1.0), "plain": rank + 1.0}
        self.log(values, step=self.state.global_step + 1)
        self.log({"total": values["rank"]}, step=self.state.global_step + 1, reduction="sum")
        return super().training_step(batch)

    def validation_step(self, key: str, batch: Any) -> Any:
        output = super().validation_step(key, batch)
        return {**output, "mine": output["accuracy"]}


def on_two_processes(folder: str) -> None:
    import torch.distributed as dist
    from trainkit.dialects.accmt.decorators import on_last_process, on_main_process

    rank, calls = dist.get_rank(), list[str]()

    class Guarded(Callback):
        def on_fit_start(self) -> None:
            calls.append("everywhere")
            on_main_process(lambda: calls.append("main"))()
            on_last_process(lambda: calls.append("last"))()

    place = Path(folder) / "run"
    made = trainer(
        place,
        hps(epochs=1),
        callback=Guarded(),
        metrics=[Counts("accuracy"), Mine("mine")],
        destroy_after_training=False,
    )
    module = OnTwo()
    made.fit(module, bowls(96), bowls(33))
    assert made.state.global_step == 6 and abs(module.w - (2 - 2 * 0.8**6)) < 1e-5
    assert calls == ["everywhere", "main" if rank == 0 else "last"]
    assert made.state.additional_metrics["0"]["accuracy"] == 33
    assert abs(made.state.additional_metrics["0"]["mine"] - 0.75) < 0.02
    if rank == 0:
        assert (
            logged(place, "rank") == {6: 1.5}
            and logged(place, "total") == {6: 3.0}
            and logged(place, "plain") == {6: 1.0}
        )
        assert abs(float(load_weights(place / "best_valid_loss")["w"]) - module.w) < 1e-6
    assert dist.is_initialized()
    trainer(Path(folder) / "again", hps(epochs=1)).fit(Bowl(), bowls(96), bowls(32))
    assert not dist.is_initialized()
    raise SystemExit(0)  # there is no group left that could be closed after this


@pytest.mark.spec("AC-009")
@pytest.mark.spec("AC-056")
@pytest.mark.spec("AC-089")
@pytest.mark.spec("AC-069")
@pytest.mark.spec("AC-088")
@pytest.mark.spec("AC-101")
def test_two_processes_share_batches_metrics_and_logs(forks: Any, tmp_path: Path) -> None:
    forks.succeed(on_two_processes, tmp_path, processes=2)


SCRIPT = """
import sys, torch
from torch import nn
from accmt import AcceleratorModule, Trainer
from accmt.metrics import Metric
from accmt.monitor import Monitor
import accmt.callbacks

class Near(Metric):
    def compute(self, predicted, wanted):
        return {"near": ((predicted - wanted).abs() < 0.5).float().mean().item()}

class Line(AcceleratorModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Linear(1, 1)
    def training_step(self, batch):
        return ((self(batch[0]) - batch[1]) ** 2).mean()
    def validation_step(self, key, batch):
        predicted = self(batch[0])
        return {"loss": ((predicted - batch[1]) ** 2).mean(), "near": (predicted, batch[1])}

torch.manual_seed(0)
x = torch.randn(96, 1)
data = torch.utils.data.TensorDataset(x, 3 * x + 1)
trainer = Trainer("hps.yaml", sys.argv[1], metrics=Near("near"), monitor=Monitor(learning_rate=True),
                  dataloader_num_workers=0)
trainer.register_model_saving("best_near", saving_above=0.1)
trainer.fit(Line(), data, data)
print("steps", trainer.state.global_step, "near", trainer.state.additional_metrics["0"]["near"])
"""


def test_a_script_runs_without_a_change(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "hps.yaml").write_text("hps:\n  epochs: 4\n  batch_size: 16\n  optim: {type: AdamW, lr: 1e-1}\n")
    command = [sys.executable, "-m", "trainkit.dialects", "run", "train.py", "runs/line"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "steps 24 near" in done.stdout
    assert (tmp_path / "runs" / "line" / "best_near" / "model.safetensors").is_file()
