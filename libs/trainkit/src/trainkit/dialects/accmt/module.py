"""The user's module, and the `nn.Module` that the loop trains in its place."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import default_collate

from trainkit.callbacks.weights import save_weights
from trainkit.dialects.accmt.accelerator import Accelerator, accelerator
from trainkit.dialects.accmt.padding import pad
from trainkit.errors import InvalidSetup
from trainkit.module import Loss

if TYPE_CHECKING:
    from trainkit.dialects.accmt.callbacks import Hooks
    from trainkit.dialects.accmt.freezing import Freezing
    from trainkit.dialects.accmt.progress import Progress
    from trainkit.dialects.accmt.series import Series
    from trainkit.dialects.accmt.states import TrainingState


class AcceleratorModule:
    """Set `self.model` in the constructor and override `training_step`; only `model` is trained and saved.

    Attributes:
        model: what is trained.
        teacher: optional; stays in evaluation mode, without gradients.
        state: the live `TrainingState` while a trainer runs.
        tokenizer: saved with a Hugging Face model, if set.
        tracker: gives `log(values, step)`, past the trainer's cadence.
        accelerator: which process this is; see `accmt.accelerator`.
        device: where the model is, while a trainer or evaluator runs.
        optimizer, scheduler: of the run; the schedule is None without one.
        log_every: the trainer's.
    """

    model: nn.Module
    teacher: nn.Module | None = None
    state: TrainingState
    tracker: Series
    accelerator: Accelerator = accelerator
    device: torch.device | None = None
    optimizer: torch.optim.Optimizer | None = None
    scheduler: LRScheduler | None = None
    log_every: int | None = None
    tokenizer: Any = None
    progress: Progress | None = None
    freezing: Freezing | None = None

    @property
    def status_dict(self) -> Mapping[str, Any]:
        """Returns a read-only copy of `state`, with `train_step` also as `epoch_step`. Deprecated: use `state`."""
        warnings.warn("status_dict is deprecated: use self.state", DeprecationWarning, stacklevel=2)
        return MappingProxyType({**asdict(self.state), "epoch_step": self.state.train_step})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls `model`, unless overridden."""
        return self.model(*args, **kwargs)

    def __len__(self) -> int:
        """How many parameters `model` has."""
        return sum(each.numel() for each in self.model.parameters())

    def __bool__(self) -> bool:
        return True

    def training_step(self, batch: Any) -> Tensor | Loss:
        """The mean loss of a batch, a scalar."""
        raise NotImplementedError

    def validation_step(self, key: str, batch: Any) -> Any:
        """`{"loss": scalar, METRIC: (tensors...)}` of a batch of the dataset `key`, or the loss alone."""
        raise NotImplementedError

    def test_step(self, batch: Any) -> Any:
        """What `Evaluator.evaluate` calls with each batch; returns the same as `validation_step`."""
        raise NotImplementedError

    def collate_fn_train(self, batch: list[Any]) -> Any:
        """Makes a batch of training samples. An override goes before the trainer's functions; by itself it is
        torch's."""
        return default_collate(batch)

    def collate_fn_val(self, batch: list[Any]) -> Any:
        """Makes a batch of validation samples. An override goes before the trainer's functions; by itself it is
        torch's."""
        return default_collate(batch)

    def get_optimizer(self) -> torch.optim.Optimizer | None:
        """An optimizer over `model`'s parameters, which goes before the hyperparameters'; None: theirs."""
        return None

    def get_scheduler(self, optimizer: torch.optim.Optimizer, steps_per_epoch: int, epochs: int) -> LRScheduler | None:
        """A schedule of your own, which goes before the hyperparameters'; None: theirs.

        Args:
            optimizer: of the run.
            steps_per_epoch, epochs: their product is the number of steps of the schedule. With `max_steps`, there is
                one epoch; with `step_scheduler_per_epoch`, an epoch has one step.
        """
        return None

    def get_train_dataloader(self, dataset: Any) -> Any:
        """A loader of your own; None: the trainer makes one."""
        return None

    def get_validation_dataloader(self, dataset: Any) -> Any:
        """A loader of your own for each dataset; without a dataset, also several in a mapping; None: the trainer makes
        one."""
        return None

    def freeze(self, module: nn.Module) -> None:
        """Its parameters are not trained. Before `fit`, they are left out of the optimizer; during it, they stay as
        they are from the next step on, or from the next accumulation window on."""
        if self.freezing is None:
            module.requires_grad_(False)
        else:
            self.freezing.change(module, trained=False)

    def unfreeze(self, module: nn.Module) -> None:
        """Its parameters are trained. During `fit`, those that the optimizer does not have join it, with no state, at
        the next step or at the next accumulation window."""
        if self.freezing is None:
            module.requires_grad_(True)
        else:
            self.freezing.change(module, trained=True)

    def log(self, values: Mapping[str, Any], step: int, reduction: Literal["mean", "sum"] = "mean") -> None:
        """Sends values to the tracker when the trainer's `log_every` is due. All processes have to call it.

        Raises:
            InvalidSetup: another reduction, or a tensor that is no scalar.
        """
        if self.progress is not None:
            self.progress.log(values, step, reduction)

    def log_(self, values: Mapping[str, Any], step: int, reduction: Literal["mean", "sum"] = "mean") -> None:
        """`log` at any step, whether the trainer's `log_every` is due or not."""
        if self.progress is not None:
            self.progress.log(values, step, reduction, always=True)

    @classmethod
    def from_hf(cls, path: str, type: Any = None, **kwargs: Any) -> AcceleratorModule:
        """A module around a Hugging Face model, whose loss is the model's own.

        Args:
            path: a model on the hub, or a folder.
            type: a class of transformers or its name; None: what the model's configuration says.
            kwargs: of the model's `from_pretrained`.

        Raises:
            InvalidSetup: there is no such model or class.
        """
        from trainkit.dialects.accmt.pretrained import Pretrained

        return Pretrained(path, type, (), **kwargs)

    def pad(
        self,
        tensor: Tensor | Sequence[Tensor],
        value: float,
        padding: Literal["longest", "max_length"] | None = None,
        max_length: int | None = None,
        side: Literal["left", "right"] = "right",
        op: Literal["stack", "cat"] | Callable[[Any], Any] | None = None,
    ) -> Any:
        """See `accmt.padding.pad`."""
        return pad(tensor, value, padding, max_length, side, op)


class Engine(nn.Module):
    """Holds the model; steps are the user's."""

    def __init__(
        self, owner: AcceleratorModule, state: TrainingState, metrics: Mapping[str, set[str]], hooks: Hooks
    ) -> None:
        super().__init__()
        self.model, self.hooks = owner.model, hooks
        if not self.model.training:  # as `from_pretrained` and an evaluation of the user's own leave it
            self.model.train()
        self._owner, self._state, self._metrics = owner, state, metrics
        self._told: set[str] = set()

    def training_step(self, batch: Any) -> Tensor | Loss:
        self.hooks.step_starts(batch)  # here, because a step that is tried again starts again
        found = self._owner.training_step(batch)
        loss = found.sum if isinstance(found, Loss) else found
        if not isinstance(loss, Tensor) or loss.ndim or not loss.requires_grad:
            raise TypeError(f"training_step has to return a scalar tensor with a gradient, not {_described(loss)}")
        return found

    def evaluation_step(self, batch: Any) -> dict[str, Any]:
        key = self._state.val_key
        output = self._owner.validation_step(key, batch)
        found: dict[str, Any] = {"loss": output} if isinstance(output, Tensor) else dict(output)
        if "loss" not in found:
            raise KeyError(f"validation_step returned no 'loss' on dataset {key!r}; it has {', '.join(found)}")
        for name, sets in self._metrics.items():
            if key not in sets:
                found[name] = ()
            elif name not in found:
                raise KeyError(f"validation_step returned nothing for the metric {name!r} on dataset {key!r}")
        for name in found.keys() - {"loss"} - self._metrics.keys() - self._told:
            self._told.add(name)
            warnings.warn(f"validation_step returned {name!r}, and no metric has this name", stacklevel=2)
        return found

    def save_pretrained(self, folder: Path, state_dict: Mapping[str, Tensor], max_shard_size: int) -> None:
        """Writes the model's weights under its own names; a Hugging Face model writes itself."""
        weights = {name.removeprefix("model."): each for name, each in state_dict.items()}
        model: Any = self.model
        if hasattr(model, "save_pretrained"):
            model.save_pretrained(folder, state_dict=weights, max_shard_size=max_shard_size)
            if self._owner.tokenizer is not None:
                self._owner.tokenizer.save_pretrained(folder)
        else:
            save_weights(weights, folder, max_shard_bytes=max_shard_size)


def check(module: AcceleratorModule, evaluated: bool) -> None:
    """Refuses a module that cannot be trained, before anything is done."""
    name = type(module).__name__
    if not isinstance(getattr(module, "model", None), nn.Module):
        raise InvalidSetup(f"{name} has no model: set self.model to an nn.Module in its constructor")
    if type(module).training_step is AcceleratorModule.training_step:
        raise InvalidSetup(f"{name} has no training_step(batch): give it one that returns the loss of a batch")
    if evaluated and type(module).validation_step is AcceleratorModule.validation_step:
        raise InvalidSetup(f"{name} has no validation_step(key, batch), and there is validation data")
    if evaluated:
        try:
            inspect.signature(module.validation_step).bind("0", None)
        except TypeError:
            raise InvalidSetup(
                f"{name}.validation_step{inspect.signature(module.validation_step)} has other parameters: write "
                "validation_step(self, key, batch), where key names the dataset"
            ) from None


def _described(loss: Any) -> str:
    if not isinstance(loss, Tensor):
        return f"a {type(loss).__name__}"
    return f"one of shape {tuple(loss.shape)}" if loss.ndim else "a detached one"
