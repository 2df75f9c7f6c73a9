"""`Trainer`: the dialect's parameters and defaults; `running` makes trainkit's trainer out of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType, SimpleNamespace
from typing import Any

import torch.distributed as dist

from trainkit.dialects.accmt import artifacts, checks, running, saving
from trainkit.dialects.accmt.accelerator import accelerator
from trainkit.dialects.accmt.callbacks import Callback
from trainkit.dialects.accmt.hyperparameters import HyperParameters
from trainkit.dialects.accmt.metrics import Metric, listed, names
from trainkit.dialects.accmt.module import AcceleratorModule
from trainkit.dialects.accmt.monitor import Monitor
from trainkit.dialects.accmt.pretrained import resolved
from trainkit.dialects.accmt.states import StateView, TrainingState
from trainkit.errors import InvalidSetup
from trainkit.strategies.gloo import release_tensors
from trainkit.trackers import MLflow


class Trainer:
    """Owns a run. Constructing it stores settings, checks them, and writes nothing.

    Args:
        hps_config: a YAML file, a mapping, or `HyperParameters`.
        model_path: the folder of all that the run saves.
        callback: one or several; `callbacks` is another name for it.
        kwargs: of the tracker's run: `run_name`, `tags`; and `callbacks`, and `on_change`, as `trainkit.Trainer` takes
            it.

    The other parameters are described row by row in docs/dialects/accmt.md.

    Attributes: every parameter, and
        folder: `model_path` as a `Path`.
        accelerator: which process this is; see `accmt.accelerator`.
        state: how far the run is; cannot be written.
        written_state: the same, for what runs.
        results: the last evaluation's, by `DATASET/NAME`.
        tracker: where artifacts go, once a run with a tracker began.

    Raises:
        InvalidSetup: a value is out of range, or two do not go together, such as `callback` and `callbacks`.
        TypeError: a keyword that neither the trainer nor the tracker has.
    """

    accelerator = accelerator

    def __init__(
        self,
        hps_config: HyperParameters | Mapping[str, Any] | str | Path,
        model_path: str | Path,
        track_name: str | None = None,
        enable_checkpointing: bool = True,
        multiple_checkpoints: bool = False,
        max_checkpoints: int | None = None,
        resume: bool | int | None = None,
        disable_model_saving: bool = False,
        patience: int | Mapping[str, int] | None = None,
        evaluate_every_n_steps: int | None = None,
        checkpoint_every: str | None = "epoch",
        logging_dir: str = "logs",
        log_with: str | None = None,
        log_every: int | None = -1,
        grad_accumulation_steps: int | None = None,
        gradient_checkpointing: bool = False,
        gradient_checkpointing_kwargs: Mapping[str, Any] | None = None,
        clip_grad: float | None = 1.0,
        set_to_none: bool = True,
        shuffle_train: bool = True,
        sampler: Any = None,
        collate_fn: Any = None,
        collate_fn_train: Any = None,
        collate_fn_val: Any = None,
        max_shard_size: str = "10GB",
        safe_serialization: bool = False,
        compile: bool = False,
        compile_kwargs: Mapping[str, Any] | None = None,
        safe_mode: bool = True,
        train_loss_metric_name: str = "train_loss",
        val_loss_metric_name: str = "val_loss",
        dataloader_pin_memory: bool = True,
        dataloader_num_workers: int | None = None,
        dataloader_drop_last: bool = False,
        eval_when_finish: bool = True,
        eval_when_start: bool = False,
        monitor: Monitor | Mapping[str, Any] | None = None,
        metrics: Metric | Sequence[Metric] | Mapping[str, Metric | Sequence[Metric]] | None = None,
        cleanup_cache_every_n_steps: int | None = None,
        callback: Callback | Sequence[Callback] | None = None,
        additional_tracker_config: Mapping[str, Any] | None = None,
        batch_device_placement: bool = True,
        prepare_batch: bool = True,
        safe_steps: bool = True,
        destroy_after_training: bool = True,
        enable_prepare_logging: bool = False,
        **kwargs: Any,
    ) -> None:
        self.settings = SimpleNamespace(
            **{name: value for name, value in locals().items() if name not in ("self", "kwargs")}
        )
        # A batch is one of each process here, so another number of processes may change the batch over all of them.
        self.on_change = {"batch_size": "scale", **kwargs.pop("on_change", {})}
        if "callbacks" in kwargs:
            callback = checks.one_of("callback", callback, "callbacks", kwargs.pop("callbacks"))
        checks.tracker_arguments(kwargs, type(self))
        self.run_arguments = kwargs
        self.hps = HyperParameters.of(hps_config)
        self.monitor = Monitor.of(monitor)
        if isinstance(log_with, str):
            self.settings.log_with = log_with.lower()
        checks.settings(self.settings)
        self.folder = Path(model_path)
        checks.optimizer(self.settings, self.hps)
        checks.tracker_config(self.settings, running.parameters(self))
        self.tracker: MLflow | None = None
        self.results: dict[str, float] = {}
        given: Any = callback
        self.callbacks: list[Callback] = list(given or []) if isinstance(given, list | tuple | NoneType) else [given]
        checks.instances("callback", self.callbacks, Callback)
        checks.instances("metrics", listed(metrics), Metric)
        self.written_state = TrainingState()
        self.state: TrainingState = StateView(self.written_state)
        self.rules: dict[str, tuple[float | None, float | None]] = {}
        self._began = False
        self.waiting_artifacts: list[Path] = []

    def __getattr__(self, name: str) -> Any:
        """A setting by the name of its parameter."""
        settings = vars(self).get("settings")
        if settings is None or not hasattr(settings, name):
            raise AttributeError(f"Trainer has no attribute {name!r}")
        return getattr(settings, name)

    @property
    def model_path(self) -> str:
        """The folder of all that the run saves, as text."""
        return str(self.folder)

    @property
    def track_name(self) -> str:
        """The tracker's name for this work; default the last part of `model_path`."""
        return self.settings.track_name or self.folder.name

    def register_model_saving(
        self, model_saving: str, saving_below: float | None = None, saving_above: float | None = None
    ) -> None:
        """Keeps the best model by one more rule.

        Args:
            model_saving: `best_METRIC`, `best_METRIC@DATASET`, groups joined by `/`; `best_` may be left out.
            saving_below: only values below count.
            saving_above: only values above count.

        Raises:
            InvalidSetup: `fit` began, or the rule is there already.
        """
        if self._began:
            raise InvalidSetup("register_model_saving comes before fit")
        label = saving.canonical(model_saving)
        if label in self.rules:
            raise InvalidSetup(f"the rule {label!r} is registered already")
        checks.bounds(label, saving_below, saving_above)
        self.rules[label] = (saving_below, saving_above)

    def log_artifact(self, path: str | Path) -> None:
        """Stores a file with the tracker's run, from the first process. Before `fit`, it waits until the run starts.

        Raises:
            InvalidSetup: there is no tracker.
            FileNotFoundError: there is no such file.
        """
        self._store(path, folder=False)

    def log_artifacts(self, path: str | Path) -> None:
        """Stores all files below a folder with the tracker's run, each in its subfolder. Before `fit`, they wait until
        the run starts.

        Raises:
            InvalidSetup: there is no tracker.
            FileNotFoundError: there is no such folder.
        """
        self._store(path, folder=True)

    def _store(self, path: str | Path, *, folder: bool) -> None:
        if self.tracker is None and self.settings.log_with is not None:
            self.waiting_artifacts.append(artifacts.checked(path, folder=folder))
        else:
            artifacts.store(self.tracker, path, folder=folder)

    def fit(
        self,
        module: AcceleratorModule | str | tuple[str, str | type],
        train_dataset: Any = None,
        val_dataset: Any = None,
        **kwargs: Any,
    ) -> None:
        """Trains, evaluates and saves; goes on from a checkpoint as `resume` says.

        Args:
            module: an AcceleratorModule; or a Hugging Face model by name or folder, alone or with its class.
            train_dataset: None: the module's own loader.
            val_dataset: one, several in a list or by key; None: the module's own loader, or no evaluation.
            kwargs: of `from_pretrained`, for a model given by name.

        Raises:
            TypeError: `module` is something else, or there are keywords with a module that is built already.
            FileNotFoundError: `resume=True` without a checkpoint.
            IndexError: `resume` names a checkpoint that there is not.
        """
        self._began = True
        try:
            chosen = resolved(module, names(self.settings.metrics), kwargs)
            self.results = running.run(self, chosen, train_dataset, val_dataset)
        finally:
            if self.settings.destroy_after_training and dist.is_initialized():
                release_tensors()
                dist.destroy_process_group()
