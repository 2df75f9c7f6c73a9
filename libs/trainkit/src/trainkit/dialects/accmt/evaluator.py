"""`Evaluator`: one evaluation of a module, outside of training."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.data import Loader
from trainkit.dialects.accmt.accelerator import accelerator
from trainkit.dialects.accmt.launching import launch
from trainkit.dialects.accmt.metrics import Metric, skipped
from trainkit.dialects.accmt.module import AcceleratorModule
from trainkit.dialects.accmt.tqdm import tqdm
from trainkit.errors import InvalidSetup
from trainkit.loop.batches import moved
from trainkit.loop.evaluation import in_evaluation_mode
from trainkit.loop.losses import Mean
from trainkit.precision import Precision
from trainkit.strategies.base import Strategy


class Evaluator:
    """Evaluates a module on a dataset, on one process or with its rows divided among several.

    Args:
        metrics: of the values that the step returns under their names.
        compile: compile the model first.
        batch_size: samples per process and step.
        device_placement: move batches to the device.
        num_workers: processes that load; None: as many as there are training processes.
        pin_memory: page-locked memory, where there is a GPU.
        collate_fn: makes a batch of samples; None: torch's own.
        prepare_batch, enable_prepare_logging: have no effect without DeepSpeed.

    Raises:
        InvalidSetup: `TRAINKIT_STRATEGY` names a sharded strategy.
    """

    def __init__(
        self,
        metrics: Metric | Sequence[Metric] | None = None,
        compile: bool = False,
        batch_size: int = 1,
        device_placement: bool = True,
        num_workers: int | None = None,
        pin_memory: bool = True,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        prepare_batch: bool = True,
        enable_prepare_logging: bool = False,
    ) -> None:
        self.metrics = [metrics] if isinstance(metrics, Metric) else list(metrics or [])
        self.compile, self.batch_size, self.collate_fn = compile, batch_size, collate_fn
        self.device_placement, self.pin_memory = device_placement, pin_memory
        self.num_workers = accelerator.num_processes if num_workers is None else num_workers
        self.prepare_batch, self.enable_prepare_logging = prepare_batch, enable_prepare_logging

    def evaluate(
        self,
        module: AcceleratorModule,
        dataset: Any,
        eval_logic_fn_name: str = "test_step",
        results_output: str | Path | None = "results.json",
    ) -> dict[str, float]:
        """The loss, weighted by rows, and the metrics over all rows; the same on every process.

        Args:
            module: its `model`, and `teacher` if any, are in evaluation mode meanwhile.
            dataset: what is evaluated on.
            eval_logic_fn_name: the module's method that is called with each batch. It returns a loss, or a mapping of
                metrics to their values, and `loss` if there is one. `validation_step` gets the key "0".
            results_output: the JSON file that the first process writes; None: none.

        Raises:
            InvalidSetup: the module has no such method, or the dataset no rows.
            KeyError: the method returned nothing for a metric.
        """
        if not callable(getattr(module, eval_logic_fn_name, None)):
            raise InvalidSetup(f"{type(module).__name__} has no method {eval_logic_fn_name!r}: give it one")
        step = getattr(module, eval_logic_fn_name)
        if eval_logic_fn_name == "validation_step":
            step = partial(step, "0")
        world = accelerator.num_processes
        chosen = launch(SimpleNamespace(enable_prepare_logging=self.enable_prepare_logging, safe_mode=True), world)
        strategy = chosen.strategy
        if strategy.name not in ("single", "ddp"):
            raise InvalidSetup(f"Evaluator does not support {strategy.name}: set TRAINKIT_STRATEGY to ddp, or unset it")
        strategy.open("cpu" if accelerator.device.type == "cpu" else None)
        try:
            results = self._results(strategy, Precision(chosen.precision, strategy.device), module, step, dataset)
        finally:
            strategy.close()
        if strategy.is_main:
            listed = "".join(f"\n  {name}: {value:g}" for name, value in results.items())
            sys.stdout.write(f"Results on {len(dataset)} samples:{listed}\n")
            if results_output is not None:
                Path(results_output).write_text(json.dumps(results, indent=2) + "\n", "utf-8")
        return results

    def evaluate_on_test(
        self, module: AcceleratorModule, dataset: Any, results_output: str | Path | None = "results.json"
    ) -> dict[str, float]:
        """`evaluate` with the module's `test_step`."""
        return self.evaluate(module, dataset, "test_step", results_output)

    def evaluate_on_validation(
        self, module: AcceleratorModule, dataset: Any, results_output: str | Path | None = "results.json"
    ) -> dict[str, float]:
        """`evaluate` with the module's `validation_step`."""
        return self.evaluate(module, dataset, "validation_step", results_output)

    def _results(
        self, strategy: Strategy, precision: Precision, module: AcceleratorModule, step: Any, dataset: Any
    ) -> dict[str, float]:
        device, loader = strategy.device, self._loader(strategy, dataset)
        parts = nn.ModuleList(filter(None, (module.model, module.teacher))).to(device)
        if self.compile:
            for part in parts:
                part.compile()
        module.device = device
        mean, counted = Mean(device), False
        metrics = {metric.name: metric.adapted().to(device) for metric in self.metrics}
        batches: Iterable[Any] = moved(loader.batches(0), device if self.device_placement else None, None)
        with (
            in_evaluation_mode(parts),
            torch.inference_mode(),
            torch.autocast(device.type, precision.dtype, precision.autocasts),
        ):
            for position, batch in enumerate(tqdm(batches, total=loader.steps(0), desc="evaluating", leave=False)):
                output, rows = step(batch), loader.rows(0, position)
                found: Mapping[str, Any] = {"loss": output} if isinstance(output, Tensor) else output
                if "loss" in found:
                    mean.add(found["loss"], rows)
                    counted = True
                if rows:
                    _update(metrics, found, step)
        results: dict[str, float] = {}
        if counted:
            total, weight = mean.over(strategy)
            results["loss"] = total / weight
        for metric in metrics.values():
            results.update(metric.compute())
        return results

    def _loader(self, strategy: Strategy, dataset: Any) -> Loader:
        if not len(dataset):
            raise InvalidSetup("the dataset has no rows")
        loader = Loader(
            dataset,
            self.batch_size * strategy.world_size,
            shuffle=False,
            num_workers=self.num_workers,
            collate=self.collate_fn,
            pin_memory=None if self.pin_memory else False,
        )
        loader.bind(seed=0, rank=strategy.rank, world_size=strategy.world_size, device=strategy.device)
        return loader


def _update(metrics: Mapping[str, Any], found: Mapping[str, Any], step: Any) -> None:
    for name, metric in metrics.items():
        if name not in found:
            method = getattr(step, "func", step).__name__
            raise KeyError(f"{method} returned nothing for the metric {name!r}; it has {', '.join(found)}")
        values = found[name] if isinstance(found[name], tuple | list) else (found[name],)
        if not skipped(values):
            metric.update(*values)
