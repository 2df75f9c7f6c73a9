"""Models given to `fit` by name: a name or folder of Hugging Face's, alone or with a class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from trainkit.dialects.accmt.module import AcceleratorModule
from trainkit.errors import InvalidStep
from trainkit.module import Loss

_FORMS = 'an AcceleratorModule, "NAME", ("NAME", "CLASS") or ("NAME", class)'


class Pretrained(AcceleratorModule):
    """A Hugging Face model; its loss is the model's own, and metrics get logits and labels.

    Args:
        name: of a model on the hub, or a folder.
        kind: a class of transformers or its name; None: what the model's configuration says.
        metrics: names of the trainer's metrics.
        arguments: of the model's `from_pretrained`.

    Raises:
        InvalidSetup: there is no such model or class.
    """

    def __init__(self, name: str, kind: str | type | None, metrics: Sequence[str], **arguments: Any) -> None:
        from trainkit.huggingface import HuggingFace

        self._name = name
        self._inner = HuggingFace.from_pretrained(name, kind, metrics=tuple(metrics), **arguments)
        self.model, self.tokenizer = self._inner.model, self._inner.tokenizer

    def training_step(self, batch: Any) -> Tensor | Loss:
        try:
            return self._inner.training_step(batch)
        except InvalidStep as error:
            raise self._explained(error) from error

    def validation_step(self, key: str, batch: Any) -> dict[str, Any]:
        try:
            return self._inner.evaluation_step(batch)
        except InvalidStep as error:
            raise self._explained(error) from error

    def _explained(self, error: InvalidStep) -> InvalidStep:
        return InvalidStep(f"{error}; say which head: fit(({self._name!r}, 'AutoModelForSequenceClassification'), ...)")


def resolved(given: Any, metrics: Sequence[str], arguments: dict[str, Any]) -> AcceleratorModule:
    """The module that `fit` was given, or that it names.

    Raises:
        TypeError: it is something else, or there are keywords with a module that is built already.
    """
    if isinstance(given, str):
        return Pretrained(given, None, metrics, **arguments)
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], str) and isinstance(given[1], str | type):
        return Pretrained(given[0], given[1], metrics, **arguments)
    if not isinstance(given, AcceleratorModule):
        raise TypeError(f"fit takes {_FORMS}, not a {type(given).__name__}")
    if arguments:
        raise TypeError(f"fit takes keywords only for a model given by name: {', '.join(arguments)}")
    return given
