"""Two processes: what each loads, sends and says."""

from __future__ import annotations

import contextlib
import io
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from trainkit.dialects.accmt import Monitor

from libs.trainkit.tests.dialects.accmt.bowl import Bowl, apart, bowls, fitted, hps, logged, trainer

# The module returns the values of a metric that the runs here do not have.
pytestmark = pytest.mark.filterwarnings("ignore:validation_step returned")
LIGHT: dict[str, Any] = {"enable_checkpointing": False, "disable_model_saving": True, "destroy_after_training": False}
WARMED: dict[str, Any] = {"scheduler": "LinearWithWarmup", "scheduler_kwargs": {"num_warmup_steps": 4}}


def on_two_processes(folder: str) -> None:
    import torch.distributed as dist
    import trainkit.data.loader
    from torch.nn.modules.module import register_module_forward_pre_hook
    from torch.nn.parallel import DistributedDataParallel

    place, rank, found = Path(folder), dist.get_rank(), dict[str, Any]()
    wrapped: list[int] = []

    def count(module: Any, given: tuple[Any, ...]) -> None:
        if isinstance(module, DistributedDataParallel) and not isinstance(given[0], str):
            wrapped.append(1)

    register_module_forward_pre_hook(count)
    for safe, retried in ((True, True), (True, False), (False, True), (False, False)):
        wrapped.clear()
        module = Bowl()
        options: dict[str, Any] = {"safe_mode": safe, "safe_steps": retried, "shuffle_train": False, **LIGHT}
        with warnings.catch_warnings(record=True) as told:
            trainer(place / f"{safe}-{retried}", hps(epochs=1), **options).fit(module, apart(), bowls(32))
        assert sum("safe_mode=False" in str(each.message) for each in told) == (not safe)
        weights: list[Any] = [None, None]
        dist.all_gather_object(weights, module.w)
        found[f"wrapped {safe} {retried}"] = len(wrapped)
        if dist.get_rank() == 0:
            losses = logged(place / f"{safe}-{retried}", "train_loss")
            assert losses == {6: pytest.approx(1 + sum(4 * 0.64**step for step in range(6)) / 6)}, losses
        assert weights[0] == weights[1] and abs(weights[0] - 1.475712) < 1e-5, weights

    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        options = {**LIGHT, "monitor": Monitor(learning_rate=True), "log_every": 1}
        trainer(place / "rates", hps(**WARMED), **options).fit(Bowl(), bowls(96))
        trainer(place / "three", hps(epochs=1), grad_accumulation_steps=3, **LIGHT).fit(Bowl(), bowls(96))
    found["said"] = said.getvalue()

    asked: list[int] = []
    made = trainkit.data.loader.DataLoader

    def noted(*given: Any, **options: Any) -> Any:
        asked.append(options["num_workers"])
        return made(*given, **options)

    trainkit.data.loader.DataLoader = noted  # type: ignore[assignment, misc]
    for workers in (None, 0):
        asked.clear()
        # A loader is made when it is first read, so an evaluation has to run before the only step.
        options = {"dataloader_num_workers": workers, "eval_when_start": True, **LIGHT}
        trainer(place / str(workers), hps(max_steps=1), **options).fit(Bowl(), bowls(96), bowls(32))
        found[f"workers {workers}"] = list(asked)
    (place / f"found-{rank}.json").write_text(json.dumps(found))


@pytest.mark.spec("AC-012")
@pytest.mark.spec("AC-018")
@pytest.mark.spec("AC-022")
@pytest.mark.spec("AC-032")
@pytest.mark.spec("AC-044")
def test_two_processes_load_step_and_tell_as_documented(forks: Any, tmp_path: Path) -> None:
    forks.succeed(on_two_processes, tmp_path / "two", processes=2)
    first, second = (json.loads((tmp_path / "two" / f"found-{rank}.json").read_text()) for rank in range(2))
    for found in (first, second):
        assert [found[f"wrapped {safe} {retried}"] for safe in (True, False) for retried in (True, False)] == [
            6,
            6,
            0,
            0,
        ]
        assert (found["workers None"], found["workers 0"]) == ([2, 2], [0, 0])
    assert "= 16 per update" in first["said"] and "= 48 per update" in first["said"] and second["said"] == ""
    options: dict[str, Any] = {"monitor": Monitor(learning_rate=True), "log_every": 1, **LIGHT}
    fitted(tmp_path / "one", hps(epochs=1, **WARMED), val=None, **options)
    alone, together = logged(tmp_path / "one", "learning_rate"), logged(tmp_path / "two" / "rates", "learning_rate")
    assert len(alone) == 12 and together == alone
