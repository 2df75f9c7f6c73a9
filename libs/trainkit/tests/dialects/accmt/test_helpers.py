"""What projects import beside the trainer: processes, parts of data, bars, samplers."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from trainkit.dialects.accmt import accelerator, decorators, utility, utils
from trainkit.dialects.accmt import tqdm as bar
from trainkit.dialects.accmt.accelerator import allow_tf32, autocast, autocast_
from trainkit.dialects.accmt.dataloader_samplers import DistributedWeightedRandomSampler, TemperatureSampler
from trainkit.dialects.accmt.monitor import Monitor
from trainkit.dialects.accmt.states import TrainingState

from libs.trainkit.tests.dialects.accmt.bowl import Numbers, Ordered, fitted, hps


def on_two_processes(folder: str) -> None:
    rank, place = accelerator.process_index, Path(folder)
    rows = accelerator.gather({"rows": torch.full((rank + 1, 2), float(rank)), "one": torch.tensor(rank)})
    assert rows["rows"].tolist() == [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]] and rows["one"].tolist() == [0, 1]
    assert accelerator.gather_for_metrics(torch.tensor([rank])).tolist() == [0, 1]
    assert accelerator.reduce(torch.tensor(rank + 1.0)).item() == 3.0
    assert accelerator.reduce([torch.tensor(rank + 1.0)], reduction="mean")[0].item() == 1.5
    with accelerator.main_process_first():
        if accelerator.is_main_process:
            (place / "first").touch()
        assert (place / "first").exists()
    accelerator.print("from", rank)
    found = [accelerator.num_processes, accelerator.is_last_process, utility.MASTER_PROCESS, utility.LAST_PROCESS]
    calls = [
        decorators.on_process(lambda: "second", 1)(),
        decorators.on_local_process(0)(lambda: "first")(),
        accelerator.on_main_process(lambda: "main")(),
        accelerator.on_local_main_process(lambda: "local")(),
        accelerator.on_last_process(lambda: "last")(),
    ]
    part, repeated = utility.prepare_dataframe(pd.DataFrame({"a": [1, 2, 3]}), even=True)
    shown = bar(range(3), mininterval=0)
    found += [calls, part["a"].tolist(), repeated, utility.prepare([1, 2, 3]), shown.disable]
    list(shown)
    (place / f"found-{rank}.json").write_text(json.dumps(found))


@pytest.mark.spec("AC-X11")
@pytest.mark.spec("AC-X12")
@pytest.mark.spec("AC-X13")
def test_two_processes_exchange_rows_and_have_parts_of_data(forks: Any, tmp_path: Path) -> None:
    forks.succeed(on_two_processes, tmp_path, processes=2, imports=["pandas"])
    first, second = (json.loads((tmp_path / f"found-{rank}.json").read_text()) for rank in range(2))
    assert first == [2, False, True, False, [None, "first", "main", "local", None], [1, 2], 1, [1, 2], False]
    assert second == [2, True, False, True, ["second", None, None, None, "last"], [3, 3], 1, [3], True]
    assert "from 0" in (tmp_path / "rank-0.log").read_text()
    assert "from 1" not in (tmp_path / "rank-1.log").read_text()


@pytest.mark.spec("AC-X11")
def test_the_accelerator_says_where_a_lone_process_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert accelerator.is_main_process and accelerator.is_local_main_process and accelerator.is_last_process
    assert (accelerator.num_processes, accelerator.process_index, accelerator.local_process_index) == (1, 0, 0)
    assert accelerator.mixed_precision == "no" and accelerator.device.type in ("cpu", "cuda", "mps")
    monkeypatch.setenv("TRAINKIT_STRATEGY", "ddp-bf16")
    assert accelerator.mixed_precision == "bf16"
    accelerator.wait_for_everyone()
    assert accelerator.gather(torch.tensor(2)).tolist() == [2]
    model = nn.Linear(1, 1)
    assert accelerator.unwrap_model(nn.DataParallel(model)) is model
    with pytest.raises(ValueError, match="sum or mean"):
        accelerator.reduce(torch.ones(1), reduction="max")  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match=r"no 'prepare'; it has .*wait_for_everyone"):
        accelerator.prepare  # noqa: B018


@pytest.mark.spec("AC-X11")
def test_tensors_get_the_format_of_the_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setattr(sys.modules["trainkit.dialects.accmt.accelerator"], "precision", torch.bfloat16)
    one = torch.ones(2)
    assert autocast(one).dtype == torch.bfloat16
    assert [each.dtype for each in autocast(one, one)] == [torch.bfloat16] * 2 and one.dtype == torch.float32
    autocast_(one)
    assert one.dtype == torch.bfloat16
    before = torch.get_float32_matmul_precision()
    allow_tf32()
    assert torch.get_float32_matmul_precision() == "high" and torch.backends.cudnn.allow_tf32
    allow_tf32(False)
    assert torch.get_float32_matmul_precision() == "highest" and not torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision(before)


@pytest.mark.spec("AC-X12")
def test_data_is_divided_among_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utility, "WORLD_SIZE", 3)

    def parts(data: Any, even: bool) -> list[Any]:
        found = []
        for rank in range(3):
            monkeypatch.setattr(utility, "RANK", rank)
            found.append(utility.prepare_array(data, even))
        return found

    assert parts([1, 2, 3, 4], even=False) == [[1, 2], [3], [4]]
    assert parts((1, 2, 3, 4), even=True) == [(1, 2), (3, 4), (4, 4)]
    assert [each.tolist() for each in parts(np.arange(4), even=True)] == [[0, 1], [2, 3], [3, 3]]
    assert [each.tolist() for each in parts(torch.arange(4), even=False)] == [[0, 1], [2], [3]]
    monkeypatch.setattr(utility, "RANK", 0)
    assert utility.prepare([1, 2, 3], 7) == [[1], 7]
    with pytest.raises(ValueError, match="not a int"):
        utility.prepare_array(7)


@pytest.mark.spec("AC-X12")
def test_small_helpers() -> None:
    assert utility.divide_into_batches([1, 2, 3, 4, 5], 2) == [[1, 2], [3, 4], [5]]
    assert list(utility.iterbatch("abc", 2)) == ["ab", "c"]
    assert utility.pad(torch.ones(1, 2), 4, 0).tolist() == [[1, 1, 0, 0]]
    assert utility.pad(torch.ones(1, 2), 1, 0).shape == (1, 2)
    assert utils.combine_dicts({"a": 1, "b": 1}, {"b": 2}) == {"a": 1, "b": 2}
    assert utils.divide_list([1, 2, 3, 4, 5], 3) == [[1, 2], [3, 4], [5]]
    assert utils.filter_kwargs({"lr": 1, "other": 2}, lambda lr: lr) == {"lr": 1}
    assert utils.get_number_and_unit("2eps") == (2, "epoch") and utils.get_number_and_unit("eval") == (1, "eval")
    assert utils.get_number_and_unit("10 Steps") == (10, "step") and utils.get_number_and_unit("3 h") == (3, None)
    assert all(map(utils.is_url, ("http://host:5000", "https://host.org/a", "localhost"))) and not utils.is_url("logs")
    utils.set_seed(7)
    first = torch.rand(1)
    utils.set_seed(7)
    assert torch.equal(first, torch.rand(1)) and utils.get_seed(3) == 7
    utils.cleanup()


@pytest.mark.spec("AC-X13")
def test_a_bar_shows_seconds_per_iteration(capsys: pytest.CaptureFixture[str]) -> None:
    shown = bar(total=2, bar_format="{n_fmt} {rate_s}", ncols=40)
    assert shown.format_dict["rate_s"] == "? s"
    assert shown.format_meter(**{**shown.format_dict, "rate_s": "0.250 s"}) == "0 0.250 s"
    now = shown.start_t = shown.last_print_t = 0.0
    shown._time = lambda: now
    now = 0.5
    shown.update(2)
    assert shown.format_dict["rate_s"] == "0.250 s"
    shown.close()
    assert bar(total=1, disable=True).disable
    assert "? s" in capsys.readouterr().err


@pytest.mark.spec("AC-X15")
def test_weights_draw_from_each_process_s_own_indices() -> None:
    drawn = []
    for rank in range(2):
        place = SimpleNamespace(num_processes=2, process_index=rank)
        weights = [0.0, 1.0, 1.0, 3.0]
        made = DistributedWeightedRandomSampler(place, weights, 400, generator=torch.Generator().manual_seed(0))
        drawn.append(list(made))
    made.set_epoch(1)
    second = list(made)
    made.set_epoch(1)
    assert set(drawn[0]) == {2} and 250 < Counter(drawn[1])[3] < 350
    assert len(made) == 400 and list(made) == second != drawn[1]
    with pytest.raises(ValueError, match="generator"):
        DistributedWeightedRandomSampler(SimpleNamespace(num_processes=2, process_index=0), [1.0], 1)


@pytest.mark.spec("AC-X15")
@pytest.mark.parametrize(("temperature", "share"), [(1, 0.1), (2, 0.25), (1000, 0.5)])
def test_a_temperature_raises_the_share_of_a_rare_class(tmp_path: Path, temperature: float, share: float) -> None:
    samples = [{"x": 0, "label": "often"}] * 90 + [{"x": 0, "label": "rare"}] * 10
    made = TemperatureSampler(samples, temperature, seed=0)(SimpleNamespace(num_processes=1, process_index=0))
    weights = made.weights.double()
    assert weights[90:].sum() / weights.sum() == pytest.approx(share, abs=2e-3) and len(made) == 100
    (tmp_path / "counts.csv").write_text("class,count\noften,90\nrare,10\n")
    given = TemperatureSampler(samples, temperature, str(tmp_path / "counts.csv"), lambda sample: sample["label"])
    assert torch.equal(given(accelerator).weights, made.weights)


@pytest.mark.spec("AC-X15")
def test_a_trainer_draws_with_a_temperature(tmp_path: Path) -> None:
    orders = []
    for name in ("a", "b"):
        sampler = TemperatureSampler(Numbers(), 1, target_format=lambda sample: int(sample[2]) < 6)
        options: dict[str, Any] = {"sampler": sampler, "val": None, "enable_checkpointing": False}
        _, module = fitted(tmp_path / name, hps(epochs=1), module=Ordered(), train=Numbers(), **options)
        orders.append(module.order)
    assert orders[0] == orders[1] and len(orders[0]) == 96 > len(set(orders[0]))


@pytest.mark.spec("AC-X23")
def test_states_and_monitors_are_stored_in_files(tmp_path: Path) -> None:
    state = TrainingState(global_step=3)
    state.update(epoch=2, patience_left={"best_valid_loss": 1}, unknown=1)
    state.save(tmp_path / "state.json")
    read = TrainingState()
    read.load(tmp_path / "state.json")
    assert read == state and read.to_dict()["epoch"] == 2
    read.from_dict({"epoch": 5})
    assert (read.epoch, read.global_step) == (5, 3)
    (tmp_path / "monitor.yaml").write_text("grad_norm: true\n")
    assert Monitor.from_config(str(tmp_path / "monitor.yaml")) == Monitor.from_config({"grad_norm": True})
    assert Monitor.from_config({"grad_norm": True}) == Monitor(grad_norm=True) != Monitor.from_config(None)
