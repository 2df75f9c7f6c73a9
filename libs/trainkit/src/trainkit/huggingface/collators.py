"""Batches out of tokenized samples: mappings with `input_ids`, `attention_mask`, `labels`.

A sample may be a mapping, or a tuple of several parts, mappings and others: each part is collated by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from trainkit.errors import InvalidSetup, InvalidStep
from trainkit.extras import require

IGNORED = -100
"""The label that losses of torch and transformers do not count."""

_KEYS = ("input_ids", "attention_mask", "labels")


class _Padding:
    """Pads to the longest sequence of a batch, on the tokenizer's side."""

    def __init__(self, tokenizer: Any) -> None:
        if tokenizer.pad_token_id is None:
            raise InvalidSetup(
                f"{type(tokenizer).__name__} has no pad token: set one, for instance "
                "tokenizer.pad_token = tokenizer.eos_token"
            )
        self.tokenizer = tokenizer

    def _padded(self, rows: Sequence[Any], value: int) -> Tensor:
        tensors = [torch.as_tensor(row) for row in rows]
        return torch.nn.utils.rnn.pad_sequence(
            tensors, batch_first=True, padding_value=value, padding_side=self.tokenizer.padding_side
        )

    def _tokens(self, samples: Sequence[Mapping[str, Any]], labels: int) -> dict[str, Tensor]:
        fills = dict(zip(_KEYS, (self.tokenizer.pad_token_id, 0, labels), strict=True))
        return {key: self._padded([each[key] for each in samples], fills[key]) for key in _KEYS if key in samples[0]}


class PadSequences(_Padding):
    """For sequences whose labels are sequences too: translation, summaries, tagging.

    Args:
        tokenizer: says the pad token and the side.
        label_fill: what labels are padded with.

    Raises:
        InvalidSetup: the tokenizer has no pad token.
    """

    def __init__(self, tokenizer: Any, *, label_fill: int = IGNORED) -> None:
        super().__init__(tokenizer)
        self.label_fill = label_fill

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Mappings, or tuples of them and other things: `[(tokens, 7), ...]` becomes `(tokens, tensor([7, ...]))`."""
        if isinstance(samples[0], tuple):
            return tuple(self._part(part) for part in zip(*samples, strict=True))
        return self._part(samples)

    def _part(self, samples: Sequence[Any]) -> Any:
        if isinstance(samples[0], Mapping) and "input_ids" in samples[0]:
            return self._tokens(samples, self.label_fill)
        return default_collate(list(samples))


class PadInputs(_Padding):
    """For sequences with one label each: classification, regression.

    Args:
        tokenizer: says the pad token and the side.
        stack: labels become one tensor; else they stay a list.

    Raises:
        InvalidSetup: the tokenizer has no pad token.
    """

    def __init__(self, tokenizer: Any, *, stack: bool = True) -> None:
        super().__init__(tokenizer)
        self.stack = stack

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Mappings; with `labels` or `label` of one number in each, they become the batch's `labels`. Pairs
        `(tokens, label)` become `(tokens, labels)`."""
        if isinstance(samples[0], tuple):
            tokens, labels = zip(*samples, strict=True)
            return self._tokens(tokens, IGNORED), self._labels(labels)
        plain = [{key: each[key] for key in ("input_ids", "attention_mask") if key in each} for each in samples]
        batch: dict[str, Any] = self._tokens(plain, IGNORED)
        key = next((key for key in ("labels", "label") if key in samples[0]), None)
        return batch if key is None else batch | {"labels": self._labels([each[key] for each in samples])}

    def _labels(self, labels: Sequence[Any]) -> Any:
        if any(torch.as_tensor(label).ndim and len(label) > 1 for label in labels):
            raise InvalidStep(
                "PadInputs takes one label for each sequence; for labels that are sequences use PadSequences"
            )
        return torch.stack([torch.as_tensor(label) for label in labels]) if self.stack else list(labels)


class LanguageModel(_Padding):
    """For training a language model: masked tokens to be found, or the text itself for a causal model.

    Args:
        tokenizer: says the pad token, and the mask token.
        masked: some tokens are hidden and are the labels; else labels are the inputs.
        probability: of a token to be chosen.
        to_mask: the share of chosen tokens that become the mask token; half of the rest become random ones.
        random_words: False leaves all of the rest as they are.
        label_fill: the label of what does not count.
        inputs_only: of samples that are tuples, keep the tokens and drop the rest.

    Raises:
        InvalidSetup: the tokenizer has no pad token, or no mask token when that is needed.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        masked: bool = True,
        probability: float = 0.15,
        to_mask: float = 0.8,
        random_words: bool = True,
        label_fill: int = IGNORED,
        inputs_only: bool = False,
    ) -> None:
        super().__init__(tokenizer)
        if masked and tokenizer.mask_token is None:
            raise InvalidSetup(f"{type(tokenizer).__name__} has no mask token: use masked=False for a causal model")
        transformers = require("transformers", "the collator of language models")
        self.label_fill, self.inputs_only, self._masked = label_fill, inputs_only, masked
        self._collator = transformers.DataCollatorForLanguageModeling(
            tokenizer,
            mlm=masked,
            mlm_probability=probability if masked else None,
            mask_replace_prob=to_mask,
            random_replace_prob=(1 - to_mask) / 2 if random_words else 0,
        )

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Mappings with `input_ids`, or tuples `(tokens, target)`, which become `(tokens, targets)`."""
        if isinstance(samples[0], tuple):
            tokens, *others = zip(*samples, strict=True)
            batch = self._batch(tokens)
            return batch if self.inputs_only else (batch, *(default_collate(list(other)) for other in others))
        return self._batch(samples)

    def _batch(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        batch = self._tokens([{key: each[key] for key in _KEYS[:2] if key in each} for each in samples], IGNORED)
        inputs = batch["input_ids"]
        if "attention_mask" not in batch:
            batch["attention_mask"] = (inputs != self.tokenizer.pad_token_id).long()
        if self._masked:
            batch["input_ids"], labels = self._collator.torch_mask_tokens(inputs.clone(), self._special(inputs, batch))
        else:
            labels = inputs.masked_fill(batch["attention_mask"] == 0, IGNORED)
        return batch | {"labels": labels.masked_fill(labels == IGNORED, self.label_fill)}

    def _special(self, inputs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """What is never chosen: special tokens and padding."""
        special = torch.isin(inputs, torch.tensor(self.tokenizer.all_special_ids))
        return special | (batch["attention_mask"] == 0)
