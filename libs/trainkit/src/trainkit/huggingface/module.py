"""Models of Hugging Face as modules that a `Trainer` takes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from torch import Tensor, nn

from trainkit.catalogue import nearest
from trainkit.errors import InvalidSetup, InvalidStep
from trainkit.extras import require


class HuggingFace(nn.Module):
    """A transformers model. Its loss is the model's own, so batches are mappings with `labels`.

        module = HuggingFace.from_pretrained("bert-base-cased", "AutoModelForSequenceClassification", num_labels=4)

    An evaluation returns `loss`, and `(logits, labels)` under the name of every metric in `metrics`.

    Args:
        model: any `PreTrainedModel`.
        tokenizer: saved with the model.
        metrics: names of the trainer's metrics that take logits and labels.

    Raises:
        MissingExtra: `transformers` is not installed.
    """

    def __init__(self, model: nn.Module, tokenizer: Any = None, *, metrics: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.model, self.tokenizer, self._metrics = model, tokenizer, metrics
        if not model.training:  # as `from_pretrained` leaves it
            model.train()

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        kind: str | type | None = None,
        *,
        metrics: tuple[str, ...] = (),
        recompute: bool = False,
        **arguments: Any,
    ) -> Self:
        """Loads a model with its weights, and its tokenizer if it has one.

        Args:
            name: of a model on the hub, or a folder.
            kind: a class of transformers, or its name: `AutoModelForCausalLM`. None: what the model's configuration
                says.
            metrics: as for the class.
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
        return cls(model, _tokenizer(transformers, name), metrics=metrics)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns."""
        return self.model(*args, **kwargs)

    def training_step(self, batch: Mapping[str, Any]) -> Tensor:
        """The model's loss.

        Raises:
            InvalidStep: the model returned none.
        """
        return self._loss(self._output(batch), batch)

    def evaluation_step(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The loss, and logits with labels for the metrics."""
        output = self._output(batch)
        values: dict[str, Any] = {"loss": self._loss(output, batch)}
        return values | dict.fromkeys(self._metrics, (output.logits, batch["labels"]))

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

    def _output(self, batch: Mapping[str, Any]) -> Any:
        if not isinstance(batch, Mapping):
            raise InvalidStep(
                f"a Hugging Face model takes batches that are mappings, not {type(batch).__name__}: "
                "give the loader a collator"
            )
        return self.model(**batch)

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
        try:
            found = transformers.AutoConfig.from_pretrained(str(name)).architectures
        except OSError as error:
            raise InvalidSetup(f"no model is called {str(name)!r}: {str(error).splitlines()[0]}") from error
        if not found:
            raise InvalidSetup(f"{name}: its configuration names no architecture: give kind='AutoModelFor...'")
        kind = str(found[0])
    loader = getattr(transformers, kind, None)
    if not isinstance(loader, type) or not hasattr(loader, "from_pretrained"):
        near = nearest(kind, [each for each in dir(transformers) if "Model" in each or "For" in each])
        raise InvalidSetup(f"transformers has no model class {kind!r}" + (f"; did you mean {near}?" if near else ""))
    return loader


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
