"""Collators under the dialect's names."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from trainkit.dialects.accmt.collate_fns import (
    DataCollatorForLanguageModeling,
    DataCollatorForLongestSequence,
    DataCollatorForSeq2Seq,
)

WORDS = ["[PAD]", "[UNK]", "[MASK]", "[CLS]", "[SEP]", *(f"word{at}" for at in range(95))]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    model = Tokenizer(WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="[UNK]"))
    names = {"pad_token": "[PAD]", "mask_token": "[MASK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=model, unk_token="[UNK]", **names)


def sample(length: int, labels: list[int] | None = None) -> dict[str, Any]:
    tokens = list(range(10, 10 + length))
    return {"input_ids": tokens, "attention_mask": [1] * length} | ({} if labels is None else {"labels": labels})


def parameters(kind: type) -> str:
    return str(inspect.signature(kind)).replace(": 'Any'", "").replace("'", "")


@pytest.mark.spec("AC-106")
def test_sequences_and_their_labels_are_padded(tokenizer: Any) -> None:
    collate = DataCollatorForSeq2Seq(tokenizer)
    batch = collate([sample(3, [1, 2]), sample(5, [1, 2, 3, 4])])
    assert batch["input_ids"].shape == (2, 5) and batch["labels"][0].tolist() == [1, 2, -100, -100]
    tokens, numbers = collate([(sample(3), 7), (sample(5), 7)])
    assert isinstance(tokens, dict) and numbers.tolist() == [7, 7]
    assert DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=-1)([sample(1, [1]), sample(1, [1, 2])])["labels"][
        0
    ].tolist() == [1, -1]


@pytest.mark.spec("AC-107")
def test_tokens_are_hidden_in_the_stated_shares(tokenizer: Any) -> None:
    torch.manual_seed(0)
    inputs = torch.randint(5, 100, (1000, 1000))  # a million tokens
    samples = [{"input_ids": row} for row in inputs]
    for random_words, kept in ((True, 0.1), (False, 0.2)):
        batch = DataCollatorForLanguageModeling(tokenizer, apply_random_words=random_words)(samples)
        chosen = batch["labels"] != -100
        assert chosen.float().mean().item() == pytest.approx(0.15, abs=0.002)
        now, before = batch["input_ids"][chosen], inputs[chosen]
        assert (now == tokenizer.mask_token_id).float().mean().item() == pytest.approx(0.8, abs=0.005)
        assert (now == before).float().mean().item() == pytest.approx(kept, abs=0.005)
    causal = DataCollatorForLanguageModeling(tokenizer, mlm=False, ignore_index=-7)([sample(2), sample(3)])
    assert causal["labels"].tolist() == [[10, 11, -7], [10, 11, 12]]
    options = "mlm: bool = True, mlm_probability: float = 0.15, ignore_index: int = -100, masked_to_mask: float = 0.8"
    assert options in parameters(DataCollatorForLanguageModeling)


@pytest.mark.spec("AC-108")
def test_targets_stay_beside_the_tokens_or_are_dropped(tokenizer: Any) -> None:
    pairs = [(sample(2), 1.0), (sample(3), 2.0)]
    tokens, targets = DataCollatorForLanguageModeling(tokenizer)(pairs)
    assert isinstance(tokens, dict) and targets.tolist() == [1.0, 2.0]
    assert isinstance(DataCollatorForLanguageModeling(tokenizer, force_one_output=True)(pairs), dict)


@pytest.mark.spec("AC-109")
def test_inputs_are_padded_and_labels_stacked(tokenizer: Any) -> None:
    pairs = [(sample(3), 0), (sample(5), 1)]
    tokens, labels = DataCollatorForLongestSequence(tokenizer)(pairs)
    assert tokens["input_ids"].shape == (2, 5) and torch.equal(labels, torch.tensor([0, 1]))
    assert DataCollatorForLongestSequence(tokenizer, torch_stack=False)(pairs)[1] == [0, 1]
    assert DataCollatorForLongestSequence(tokenizer)([sample(1), sample(2)])["input_ids"].shape == (2, 2)
