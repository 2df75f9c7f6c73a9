"""Checkpoints: whole or not there, damage is noticed, and any library reads what they hold."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from trainkit import Best, Callback, Checkpoints, Tracker, Trainer
from trainkit.checkpoints import export, folder
from trainkit.data import Loader
from trainkit.errors import CheckpointError, DamagedCheckpoint, Interrupted, InvalidSetup, WrongCheckpoint
from trainkit.loop.fit import Fit
from trainkit.trackers import RunContext

PATIENCE_S = 240


class Line(nn.Module):
    def __init__(self, features: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(features, 1)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return F.mse_loss(self.layer(batch[0])[:, 0], batch[1])


class Asked(Callback):
    """Gets a signal while a step runs: SIGTERM, as when the machine is wanted for something else."""

    def __init__(self, at: int, number: int = signal.SIGTERM) -> None:
        self._at, self._number = at, number

    def on_step_start(self, fit: Fit, batch: Any) -> None:
        if fit.state.step == self._at:
            os.kill(os.getpid(), self._number)


class Again(Callback):
    """Gets Ctrl-C in the middle of the same step."""

    def __init__(self, at: int) -> None:
        self._at = at

    def on_forward_end(self, fit: Fit, loss: Tensor) -> None:
        if fit.state.step == self._at:
            os.kill(os.getpid(), signal.SIGINT)


def trainer(place: Path, features: int = 4, **options: Any) -> Trainer:
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(20, features, generator=generator), torch.randn(20, generator=generator))
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "optimizer": partial(torch.optim.AdamW, lr=0.05),
        "train": Loader(data, batch_size=4),
        "max_duration": "10st",
        "checkpoints": Checkpoints(folder=place, every="2st"),
        **options,
    }
    return Trainer(module=Line(features), **settings)


def same(one: Fit, other: Fit) -> bool:
    pairs = zip(one.module.parameters(), other.module.parameters(), strict=True)
    return all(torch.equal(ours, theirs) for ours, theirs in pairs)


def several(folder: str, **options: Any) -> None:
    place = Path(folder)
    fit = trainer(place / "checkpoints", **options).fit()
    weight = fit.strategy.weights()["layer.weight"]
    whole = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    (place / f"weight-{fit.strategy.rank}").write_text(json.dumps(whole.tolist()))


def on_disks_of_their_own(folder: str, **options: Any) -> None:
    rank = os.environ["RANK"]
    fit = trainer(Path(folder) / f"node-{rank}", strategy="fsdp", **options).fit()
    (Path(folder) / f"resumed-{rank}").write_text(str(fit.resumed_step))


def several_asked(folder: str) -> None:
    try:
        trainer(Path(folder) / "checkpoints", strategy="ddp", callbacks=[Asked(5)], max_duration="1000st").fit()
    except Interrupted as end:
        print(end)
        return
    raise AssertionError("it went on")


def test_machines_without_a_common_folder_have_a_part_each_of_the_checkpoints_that_are_kept(
    tmp_path: Path, forks: Any
) -> None:
    forks.succeed(on_disks_of_their_own, tmp_path, processes=2)

    first, second = tmp_path / "node-0", tmp_path / "node-1"
    assert folder.steps(first) == folder.steps(second) == [6, 8, 10]
    assert not [path for place in (first, second) for path in place.glob(".*")]
    with pytest.raises(DamagedCheckpoint, match=r"rank-00001\.\w+ is missing"):
        folder.verify(first / "step-10")
    for path in list(first.glob("step-*/*")) + list(second.glob("step-*/*")):  # as the yard puts them back
        for place in (first, second):
            (place / path.parent.name / path.name).write_bytes(path.read_bytes())
    forks.succeed(on_disks_of_their_own, tmp_path, processes=2, max_duration="12st")
    assert [(tmp_path / f"resumed-{rank}").read_text() for rank in range(2)] == ["10", "10"]


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    policy = Checkpoints(folder=tmp_path, every="2st", keep_last=2, best=Best(metric="val/loss", mode="max"))
    held_out = Loader(TensorDataset(torch.ones(4, 4), torch.zeros(4)), 4, shuffle=False)
    fit = trainer(tmp_path, checkpoints=policy, evaluate=held_out, evaluate_every="2st").fit()

    values = {
        step: folder.read_manifest(tmp_path / f"step-{step}").results["val/loss"] for step in folder.steps(tmp_path)
    }

    assert set(values) >= {8, 10}
    assert len(values) == 2 or max(values, key=lambda step: values[step]) == min(values)
    assert fit.state.checkpoints == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(f"step-{step}" for step in values)


def test_callbacks_are_told_of_each_checkpoint_also_when_the_next_one_is_due_at_once(tmp_path: Path) -> None:
    told: list[str] = []

    class Told(Callback):
        def on_checkpoint(self, fit: Fit, path: Path) -> None:
            told.append(path.name)

    policy = Checkpoints(folder=tmp_path, every="1st", keep_last=2)
    trainer(tmp_path, checkpoints=policy, callbacks=[Told()]).fit()

    assert told == [f"step-{step}" for step in range(1, 11)]


@pytest.mark.parametrize("file", ["rank-00000.safetensors", "rank-00000.json", "state.json", "index.json"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, file: str, caplog: pytest.LogCaptureFixture) -> None:
    whole = trainer(tmp_path).fit()
    damaged = tmp_path / "step-10" / file
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)

    with pytest.raises(DamagedCheckpoint, match=file):
        folder.verify(tmp_path / "step-10")
    resumed = trainer(tmp_path).fit()

    assert resumed.resumed_step == 8
    assert file in caplog.text
    assert same(resumed, whole)


def test_a_damaged_checkpoint_does_not_take_the_place_of_a_good_one(tmp_path: Path) -> None:
    trainer(tmp_path).fit()
    (tmp_path / "step-10" / "state.json").write_text("{")

    policy = Checkpoints(folder=tmp_path, every="1st", keep_last=1)
    resumed = trainer(tmp_path, checkpoints=policy, max_duration="9st").fit()

    assert resumed.resumed_step == 8
    assert trainer(tmp_path, checkpoints=policy, max_duration="9st").fit().resumed_step == 9


def test_what_a_killed_save_left_is_no_checkpoint(tmp_path: Path) -> None:
    trainer(tmp_path, max_duration="4st").fit()
    (tmp_path / ".draft-step-6").mkdir()
    (tmp_path / ".draft-step-6" / "rank-00000.safetensors").write_bytes(b"half")

    assert trainer(tmp_path, max_duration="4st").fit().resumed_step == 4
    assert not (tmp_path / ".draft-step-6").exists()


def test_a_save_killed_while_it_replaces_the_only_checkpoint_leaves_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer(tmp_path, max_duration="4st").fit()
    shutil.copytree(tmp_path / "step-4", tmp_path / ".draft-step-4")
    for other in folder.steps(tmp_path)[:-1]:
        shutil.rmtree(tmp_path / f"step-{other}")

    def rename(path: Path, to: Path) -> None:
        if path.name.startswith(".draft"):
            raise KeyboardInterrupt
        os.rename(path, to)  # noqa: PTH104 (it is the method that is patched)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "rename", rename)
        folder.commit(tmp_path, folder.read_manifest(tmp_path / "step-4"))

    assert trainer(tmp_path, max_duration="4st").fit().resumed_step == 4
    assert [path.name for path in tmp_path.iterdir()] == ["step-4"]


def test_a_finished_run_stays_finished_and_goes_on_when_more_is_asked(tmp_path: Path) -> None:
    trainer(tmp_path).fit()

    again = trainer(tmp_path).fit()
    longer = trainer(tmp_path, max_duration="12st").fit()

    assert (again.state.step, longer.resumed_step, longer.state.step) == (10, 10, 12)


def test_a_run_can_refuse_or_demand_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no good checkpoint"):
        trainer(tmp_path, checkpoints=Checkpoints(folder=tmp_path, resume="must")).fit()
    trainer(tmp_path).fit()
    with pytest.raises(CheckpointError, match="step 10"):
        trainer(tmp_path, checkpoints=Checkpoints(folder=tmp_path, resume="never")).fit()
    named = trainer(tmp_path, checkpoints=Checkpoints(folder=tmp_path, resume=tmp_path / "step-6")).fit()
    assert named.resumed_step == 6


def test_the_newest_checkpoint_is_the_one_made_last_and_not_one_of_a_branch_that_was_given_up(tmp_path: Path) -> None:
    trainer(tmp_path, checkpoints=Checkpoints(folder=tmp_path, every="2st", keep_last=9)).fit()
    named = Checkpoints(folder=tmp_path, every="1st", resume=tmp_path / "step-4", keep_last=2)

    trainer(tmp_path, checkpoints=named, max_duration="7st").fit()

    policy = Checkpoints(folder=tmp_path, keep_last=2)
    assert trainer(tmp_path, checkpoints=policy, max_duration="9st").fit().resumed_step == 7
    assert folder.steps(tmp_path) == [7, 9, 10]


@pytest.mark.parametrize("resume", ["mus", "checkpoints/step-4", None])
def test_what_a_run_goes_on_from_is_a_known_word_or_a_path(resume: Any) -> None:
    with pytest.raises(InvalidSetup, match="choose auto, must or never, or give the Path"):
        Checkpoints(resume=resume)


def test_a_best_checkpoint_has_the_least_or_the_greatest_value() -> None:
    with pytest.raises(InvalidSetup, match="choose min or max"):
        Best(metric="val/loss", mode="minimum")  # type: ignore[arg-type]


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    trainer(tmp_path).fit()

    with pytest.raises(WrongCheckpoint, match=r"layer\.weight has shape \(1, 4\), here it is \(1, 5\)"):
        trainer(tmp_path, features=5).fit()


def test_the_yard_says_where_checkpoints_are_and_where_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINYARD_CHECKPOINT_DIR", str(tmp_path))
    trainer(tmp_path, checkpoints=Checkpoints(every="2st")).fit()
    monkeypatch.setenv("TRAINYARD_RESUME_FROM", str(tmp_path / "step-8"))

    assert trainer(tmp_path, checkpoints=Checkpoints(every="2st")).fit().resumed_step == 8


def test_sigterm_within_a_window_keeps_its_gradients(tmp_path: Path) -> None:
    options = {"accumulate": 5, "checkpoints": Checkpoints(folder=tmp_path / "asked")}
    with pytest.raises(Interrupted, match="SIGTERM at step 3"):
        trainer(tmp_path, callbacks=[Asked(2)], **options).fit()
    handler = signal.getsignal(signal.SIGTERM)

    resumed = trainer(tmp_path, **options).fit()

    assert handler == signal.SIG_DFL
    assert resumed.resumed_step == 3
    assert same(resumed, trainer(tmp_path / "whole", accumulate=5).fit())


def test_a_last_checkpoint_that_is_not_durable_within_its_grace_is_given_up(tmp_path: Path) -> None:
    ended = threading.Event()

    class Stuck(Tracker):
        def open(self, context: RunContext) -> None: ...
        def log(self, values: Mapping[str, float | Tensor], step: int) -> None: ...
        def close(self, outcome: str) -> None: ...

        def flush(self) -> None:
            assert ended.wait(PATIENCE_S)

    policy = Checkpoints(folder=tmp_path, grace_s=0.05)
    with pytest.raises(Interrupted, match=r"not durable within grace_s=0\.05 seconds"):
        trainer(tmp_path, callbacks=[Asked(2)], checkpoints=policy, trackers=[Stuck()]).fit()
    ended.set()


@pytest.mark.usefixtures("sigint_raises")
def test_ctrl_c_ends_between_two_steps_with_a_checkpoint(tmp_path: Path) -> None:
    class Told(Callback):
        def __init__(self) -> None:
            self.errors: list[BaseException] = []

        def on_error(self, fit: Fit, error: BaseException) -> None:
            self.errors.append(error)

    told = Told()
    with pytest.raises(KeyboardInterrupt, match="SIGINT at step 6"):
        trainer(tmp_path, callbacks=[Asked(5, signal.SIGINT), told]).fit()

    assert folder.steps(tmp_path)[-1] == 6
    assert [type(error) for error in told.errors] == [KeyboardInterrupt]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert same(trainer(tmp_path).fit(), trainer(tmp_path / "whole").fit())


@pytest.mark.usefixtures("sigint_raises")
def test_a_second_ctrl_c_does_not_wait(tmp_path: Path) -> None:
    twice = [Asked(5, signal.SIGINT), Again(5)]
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path, callbacks=twice, checkpoints=Checkpoints(folder=tmp_path, every="2st")).fit()

    assert folder.steps(tmp_path)[-1] == 4


def test_states_whose_keys_have_slashes_keep_apart(tmp_path: Path) -> None:
    class Holding(Callback):
        def __init__(self, name: str, state: dict[str, Any]) -> None:
            self._name, self.state = name, state

        @property
        def name(self) -> str:
            return self._name

        def state_dict(self) -> dict[str, Any]:
            return self.state

        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            self.state = dict(state)

    def held(*values: float) -> list[Holding]:
        one, other, third, fourth = (torch.tensor(value) for value in values)
        return [Holding("a", {"b/c": one}), Holding("a/b", {"c": other}), Holding("a~1b", {1: third, "1": fourth})]

    trainer(tmp_path, callbacks=held(1, 2, 3, 4)).fit()
    read = held(0, 0, 0, 0)
    trainer(tmp_path, callbacks=read).fit()

    assert [float(value) for each in read for value in each.state.values()] == [1, 2, 3, 4]


def test_several_processes_end_at_the_same_step_after_sigterm(tmp_path: Path, forks: Any) -> None:
    forks.succeed(several_asked, tmp_path, processes=2)

    said = {(tmp_path / f"rank-{rank}.log").read_text().splitlines()[-1] for rank in range(2)}
    (end,) = said
    assert f"step-{end.split()[-1]}" in {path.name for path in (tmp_path / "checkpoints").iterdir()}


def test_another_number_of_processes_goes_on_with_the_same_samples(tmp_path: Path, forks: Any) -> None:
    place = tmp_path / "checkpoints"
    forks.succeed(several, tmp_path, processes=2, strategy="fsdp", max_duration="4st")

    forks.succeed(several, tmp_path, processes=4, strategy="ddp", max_duration="8st")
    resumed = trainer(place).fit()

    whole = trainer(tmp_path / "whole").fit()
    assert resumed.resumed_step == 8
    for ours, theirs in zip(resumed.module.parameters(), whole.module.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_weights_are_exported_whole_for_any_library(tmp_path: Path, forks: Any) -> None:
    forks.succeed(several, tmp_path, processes=2, strategy="fsdp")
    expected = torch.tensor(json.loads((tmp_path / "weight-0").read_text()))

    (file,) = export.export(tmp_path / "checkpoints" / "step-10", tmp_path / "model.safetensors")
    *parts, index = export.export(
        tmp_path / "checkpoints" / "step-10", tmp_path / "parts" / "model.safetensors", dtype="bf16", max_bytes=8
    )

    assert torch.equal(load_file(file)["layer.weight"], expected)
    assert set(load_file(file)) == {"layer.weight", "layer.bias"}
    assert len(parts) == 2
    where = json.loads(index.read_text())["weight_map"]["layer.weight"]
    assert torch.equal(load_file(index.with_name(where))["layer.weight"], expected.bfloat16())


def test_nothing_in_a_checkpoint_is_a_pickle(tmp_path: Path) -> None:
    trainer(tmp_path).fit()

    names = {path.name for path in (tmp_path / "step-10").iterdir()}

    assert {name.rsplit(".", 1)[1] for name in names} == {"json", "safetensors"}
    assert set(load_file(tmp_path / "step-10" / "rank-00000.safetensors")) >= {"/model/layer.weight"}


class Stream:
    """Batches without an end that anybody knows before, which can go on where it was."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[list[Tensor]]:
        while self.at < 6:
            self.at += 1
            yield [torch.full((2, 4), float(self.at)), torch.zeros(2)]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.at = state["at"]


class Seen(Callback):
    def __init__(self) -> None:
        self.batches: list[float] = []

    def on_step_start(self, fit: Fit, batch: list[Tensor]) -> None:
        self.batches.append(float(batch[0][0, 0]))


@pytest.mark.parametrize("end", [2, 6, 7])
def test_data_of_unknown_length_goes_on_where_it_was(tmp_path: Path, end: int) -> None:
    first, second = Seen(), Seen()
    trainer(tmp_path, train=Stream(), callbacks=[first], max_duration=f"{end}st").fit()
    trainer(tmp_path, train=Stream(), callbacks=[second], max_duration="9st").fit()

    assert first.batches + second.batches == [1, 2, 3, 4, 5, 6, 1, 2, 3]
