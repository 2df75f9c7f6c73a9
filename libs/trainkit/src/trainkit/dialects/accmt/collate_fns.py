"""Collators under the dialect's names; see `trainkit.huggingface`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainkit.huggingface import LanguageModel, PadInputs, PadSequences


class DataCollatorForSeq2Seq(PadSequences):
    """Pads `input_ids`, `attention_mask` and `labels` to the longest of a batch.

    Args:
        tokenizer: says the pad token and the side.
        label_pad_token_id: what labels are padded with.

    Raises:
        InvalidSetup: the tokenizer has no pad token.
    """

    def __init__(self, tokenizer: Any, label_pad_token_id: int = -100) -> None:
        super().__init__(tokenizer, label_fill=label_pad_token_id)

    def __call__(self, batch: Sequence[Any]) -> Any:
        return super().__call__(batch)


class DataCollatorForLanguageModeling(LanguageModel):
    """Hides tokens, which become the labels; without `mlm`, the labels are the inputs.

    Args:
        tokenizer: says the pad token, and the mask token.
        mlm: hide tokens.
        mlm_probability: of a token to be chosen.
        ignore_index: the label of what was not chosen.
        masked_to_mask: the share of chosen tokens that become the mask token.
        apply_random_words: half of the rest become random ones; else all of the rest stay.
        force_one_output: of samples that are tuples, keep the tokens alone.

    Raises:
        InvalidSetup: the tokenizer has no pad token, or no mask token when that is needed.
    """

    def __init__(
        self,
        tokenizer: Any,
        mlm: bool = True,
        mlm_probability: float = 0.15,
        ignore_index: int = -100,
        masked_to_mask: float = 0.8,
        apply_random_words: bool = True,
        force_one_output: bool = False,
    ) -> None:
        super().__init__(
            tokenizer,
            masked=mlm,
            probability=mlm_probability,
            to_mask=masked_to_mask,
            random_words=apply_random_words,
            label_fill=ignore_index,
            inputs_only=force_one_output,
        )

    def __call__(self, batch: Sequence[Any]) -> Any:
        return super().__call__(batch)


class DataCollatorForLongestSequence(PadInputs):
    """Pads `input_ids` and `attention_mask`; labels are one for each sequence.

    Args:
        tokenizer: says the pad token and the side.
        torch_stack: labels become one tensor; else they stay a list.

    Raises:
        InvalidSetup: the tokenizer has no pad token.
    """

    def __init__(self, tokenizer: Any, torch_stack: bool = True) -> None:
        super().__init__(tokenizer, stack=torch_stack)

    def __call__(self, batch: Sequence[Any]) -> Any:
        return super().__call__(batch)
