"""What the trainer is made with, and what a run leaves."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest
from trainkit.callbacks.weights import load_weights
from trainkit.dialects.accmt import Trainer
from trainkit.dialects.accmt.resuming import indices
from trainkit.dialects.accmt.running import _mlflow

from libs.trainkit.tests.dialects.accmt.bowl import (
    Bowl,
    bowls,
    fitted,
    hps,
    trainer,
)

# The module returns the values of a metric that most runs here do not have.
pytestmark = pytest.mark.filterwarnings("ignore:validation_step returned")


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
    for conflict in ({"max_checkpoints": 2}, {"additional_tracker_config": {"epochs": 3}}):
        with pytest.raises(ValueError, match=next(iter(conflict))):
            Trainer(hps(), tmp_path / "run", log_with="mlflow", logging_dir=str(tmp_path / "logs"), **conflict)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.spec("AC-003")
@pytest.mark.spec("AC-005")
@pytest.mark.spec("AC-064")
def test_a_run_ends_where_the_formula_says_and_leaves_a_model_and_a_checkpoint(tmp_path: Path) -> None:
    made, module = fitted(tmp_path / "new" / "run")
    assert module.w == pytest.approx(2 - 2 * 0.8**24, abs=1e-6)
    assert (made.state.epoch, made.state.global_step, made.state.finished) == (1, 24, True)
    saved = tmp_path / "new" / "run" / "best_valid_loss"
    assert saved.is_dir() and float(load_weights(saved)["w"]) == module.w
    assert json.loads((saved / "best.json").read_text())["step"] == 24
    assert len(indices(tmp_path / "new" / "run" / "checkpoints")) == 1
    with pytest.raises(TypeError):
        trainer(tmp_path).fit(Bowl(), bowls(8), num_labels=3)
    (tmp_path / "file").write_text("")
    unseen = Bowl()
    with pytest.raises((ValueError, OSError), match=r"checkpoints cannot be written to .*: Not a directory"):
        fitted(tmp_path / "file" / "run", module=unseen)
    assert unseen.seen == []
    again = trainer(tmp_path / "again", hps(epochs=1), enable_checkpointing=False)
    for module in (Bowl(), Bowl()):
        again.fit(module, bowls(96), bowls(32))
        assert module.seen[0] == (0, 0, 0, False) and again.state.evaluations_done == 1


@pytest.mark.spec("AC-004")
def test_the_name_of_the_work_is_the_last_part_of_its_folder(tmp_path: Path) -> None:
    assert trainer(Path("runs/digits/")).track_name == "digits"
    assert Trainer(hps(), "runs/digits/").track_name == "digits"
    assert Trainer(hps(), "runs/digits", track_name="other").track_name == "other"
    made = Trainer(hps(), "runs/digits/", log_with="mlflow", logging_dir=str(tmp_path))
    assert _mlflow(made).experiment == "digits"


def test_a_misspelled_parameter_is_named_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"log_evry.*did you mean log_every"):
        trainer(tmp_path, log_evry=3)


def test_nonsense_for_names_folders_and_samplers_is_refused_by_name(tmp_path: Path) -> None:
    nonsense = {
        "sampler": 3,
        "logging_dir": 3,
        "track_name": 3,
        "train_loss_metric_name": 3,
        "val_loss_metric_name": "",
    }
    for name, value in nonsense.items():
        with pytest.raises(ValueError, match=f"^{name} has to be"):
            trainer(tmp_path, **{name: value})
    with pytest.raises(ValueError, match="model_path has to be a folder, as text or as a Path, not None"):
        Trainer(hps(), None)  # type: ignore[arg-type]


def test_the_folder_of_a_run_is_text_and_trackers_are_named_in_any_case() -> None:
    assert Trainer(hps(), Path("runs") / "digits").model_path + "/x" == "runs/digits/x"
    assert Trainer(hps(), "runs/digits", log_with="MLFlow").log_with == "mlflow"
