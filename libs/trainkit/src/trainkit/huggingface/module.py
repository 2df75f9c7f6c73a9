"""Models of Hugging Face as modules that a `Trainer` takes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor, nn

from trainkit.catalogue import nearest
from trainkit.errors import InvalidSetup, InvalidStep
from trainkit.extras import require
from trainkit.huggingface.counting import noted_means
from trainkit.module import Loss

_log = logging.getLogger("trainkit")

_COUNTED = ("num_items_in_batch",)
"""What transformers' own trainer lets a model divide its loss by. Here the whole update is counted."""


Count: TypeAlias = "Callable[[Mapping[str, Any]], Tensor | int | float]"


class HuggingFace(nn.Module):
    """A transformers model. Its loss is the model's own, so batches are mappings with `labels`.

    The loss is returned as sum and count of its targets (tokens, sequences, ...), which trainkit sees when the model
    computes it with a mean of `torch.nn.functional`: updates are then exact when batches have different numbers of
    targets. What a model adds to that mean in place counts in the same way. Another loss is weighted by the rows of
    its batch, with a warning, unless `count` says over how much it is a mean. A `num_items_in_batch` in a batch is left
    out, because trainkit counts over the whole update.

        module = HuggingFace.from_pretrained("bert-base-cased", "AutoModelForSequenceClassification", num_labels=4)

    An evaluation returns `loss`, and `(logits, labels)` under the name of every metric in `metrics`.

    Args:
        model: any `PreTrainedModel`.
        tokenizer: saved with the model.
        metrics: names of the trainer's metrics that take logits and labels.
        count: how many targets the mean loss of a batch is over. None: see above.

    Raises:
        MissingExtra: `transformers` is not installed.
    """

    weights_prefix = "model."
    """What names begin with here, and not in the files of Hugging Face."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        *,
        metrics: tuple[str, ...] = (),
        count: Count | None = None,
    ) -> None:
        super().__init__()
        self.model, self.tokenizer, self._metrics, self._count = model, tokenizer, metrics, count
        self._warned = False
        if not model.training:  # as `from_pretrained` leaves it
            model.train()

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        kind: str | type | None = None,
        *,
        metrics: tuple[str, ...] = (),
        count: Count | None = None,
        recompute: bool = False,
        **arguments: Any,
    ) -> Self:
        """Loads a model with its weights, and its tokenizer if it has one.

        Args:
            name: of a model on the hub, or a folder.
            kind: a class of transformers, or its name: `AutoModelForCausalLM`. None: what the model's configuration
                says.
            metrics, count: as for the class.
            recompute: recomputes activations in the backward pass to save memory.
            arguments: of the model's `from_pretrained`: `num_labels=4`, `dtype="bfloat16"`, ...

        Raises:
            InvalidSetup: there is no such model or class, or the model cannot recompute.
        """
        transformers = require("transformers", "a Hugging Face model")
        loader = _class(transformers, name, kind)
        try:
            model = loader.from_pretrained(str(name), **arguments)
        except OSError as error:
            raise InvalidSetup(f"no model is called {str(name)!r}: {str(error).splitlines()[0]}") from error
        if recompute:
            _recompute(model)
        return cls(model, _tokenizer(transformers, name), metrics=metrics, count=count)

    @classmethod
    def from_config(
        cls,
        name: str | Path,
        kind: str | type | None = None,
        *,
        metrics: tuple[str, ...] = (),
        count: Count | None = None,
        recompute: bool = False,
        **arguments: Any,
    ) -> Self:
        """Makes a model by its configuration, in 32 bits, without reading its weights.

            Trainer(module=partial(HuggingFace.from_config, "llama"), weights="llama", strategy="fsdp", ...)

        This way no process has the whole model: it reads the part that it keeps.

        Args:
            name: of a model on the hub, or a folder.
            kind: as for `from_pretrained`.
            metrics, count: as for the class.
            recompute: recomputes activations in the backward pass to save memory.
            arguments: settings of the configuration: `num_labels=4`, ...

        Raises:
            InvalidSetup: there is no such model or class, or the model cannot recompute.
        """
        transformers = require("transformers", "a Hugging Face model")
        loader = _class(transformers, name, kind)
        config = _config(transformers, name, **arguments)
        config.dtype = torch.float32
        model = loader(config) if issubclass(loader, nn.Module) else loader.from_config(config)
        if recompute:
            _recompute(model)
        return cls(model, _tokenizer(transformers, name), metrics=metrics, count=count)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns."""
        return self.model(*args, **kwargs)

    def training_step(self, batch: Mapping[str, Any]) -> Tensor | Loss:
        """The model's loss, with the count of its targets if that is known.

        Raises:
            InvalidStep: the model returned none.
        """
        return self._run(batch)[1]

    def evaluation_step(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The loss, and logits with labels for the metrics."""
        output, loss = self._run(batch)
        return {"loss": loss, **dict.fromkeys(self._metrics, (output.logits, batch["labels"]))}

    def save_pretrained(self, folder: str | Path, **arguments: Any) -> None:
        """Saves model, configuration and tokenizer, as safetensors; `from_pretrained` of transformers reads the folder.

        Args:
            folder: where.
            arguments: of the model's `save_pretrained`; a `state_dict` has this module's names.
        """
        weights = arguments.pop("state_dict", None)
        if weights is not None:
            own = {key.removeprefix("model."): value for key, value in weights.items() if key.startswith("model.")}
            arguments["state_dict"] = own
        model: Any = self.model
        model.save_pretrained(folder, **arguments)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)

    def _run(self, batch: Mapping[str, Any]) -> tuple[Any, Tensor | Loss]:
        """What the model returns, and the loss in it."""
        if not isinstance(batch, Mapping):
            raise InvalidStep(
                f"a Hugging Face model takes batches that are mappings, not {type(batch).__name__}: "
                "give the loader a collator"
            )
        given = {name: value for name, value in batch.items() if name not in _COUNTED}
        with noted_means() as means:
            output = self(**given)
        loss = self._loss(output, batch)
        counted = Loss(loss * (count := self._count(batch)), count) if self._count is not None else means.counted(loss)
        if counted is None and not self._warned:
            self._warned = True
            _log.warning(
                "the loss of %s is no mean over targets that trainkit can count, so batches are weighted by their "
                "rows: if they hold different numbers of targets, say how many with HuggingFace(..., count=...)",
                type(self.model).__name__,
            )
        return output, loss if counted is None else counted

    def _loss(self, output: Any, batch: Mapping[str, Any]) -> Tensor:
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if loss is None:
            head = "" if "labels" in batch else ", or the batch has no 'labels'"
            raise InvalidStep(
                f"{type(self.model).__name__} returned no loss: name a class with a head, such as "
                f"from_pretrained(name, 'AutoModelForSequenceClassification'){head}"
            )
        return loss  # type: ignore[no-any-return]


def _class(transformers: Any, name: str | Path, kind: str | type | None) -> Any:
    if isinstance(kind, type):
        return kind
    if kind is None:
        found = _config(transformers, name).architectures
        if not found:
            raise InvalidSetup(f"{name}: its configuration names no architecture: give kind='AutoModelFor...'")
        kind = str(found[0])
    loader = getattr(transformers, kind, None)
    if not isinstance(loader, type) or not hasattr(loader, "from_pretrained"):
        near = nearest(kind, [each for each in dir(transformers) if "Model" in each or "For" in each])
        raise InvalidSetup(f"transformers has no model class {kind!r}" + (f"; did you mean {near}?" if near else ""))
    return loader


def _config(transformers: Any, name: str | Path, **arguments: Any) -> Any:
    try:
        return transformers.AutoConfig.from_pretrained(str(name), **arguments)
    except OSError as error:
        raise InvalidSetup(f"no model is called {str(name)!r}: {str(error).splitlines()[0]}") from error


def _recompute(model: Any) -> None:
    # Its name since transformers late 5, or the one before.
    enable = getattr(model, "activation_checkpointing_enable", getattr(model, "gradient_checkpointing_enable", None))
    if enable is None or not getattr(model, "supports_gradient_checkpointing", True):
        raise InvalidSetup(f"{type(model).__name__} cannot recompute activations: leave recompute out")
    enable()


def _tokenizer(transformers: Any, name: str | Path) -> Any:
    try:
        return transformers.AutoTokenizer.from_pretrained(str(name))
    except (OSError, ValueError, KeyError, ImportError):
        return None  # a vision model, say, or a folder without one
