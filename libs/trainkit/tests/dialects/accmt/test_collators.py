"""Collators under the dialect's names."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from trainkit.dialects.accmt.collate_fns import (
    DataCollatorForLanguageModeling,
    DataCollatorForLongestSequence,
    DataCollatorForSeq2Seq,
)

WORDS = ["[UNK]", "[PAD]", "[MASK]", "[CLS]", "[SEP]", *(f"word{at}" for at in range(95))]


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
def test_sequences_and_their_labels_are_padded(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parameters(DataCollatorForSeq2Seq) == "(tokenizer, label_pad_token_id: int = -100) -> None"
    collate = DataCollatorForSeq2Seq(tokenizer)
    batch = collate([sample(3, [1, 2]), sample(5, [1, 2, 3, 4])])
    assert batch["input_ids"].tolist() == [[10, 11, 12, 1, 1], [10, 11, 12, 13, 14]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert batch["labels"].tolist() == [[1, 2, -100, -100], [1, 2, 3, 4]]
    parts = collate([(sample(3), 7, sample(1)), (sample(5), 8, sample(2))])
    assert [type(part) for part in parts] == [dict, Tensor, dict]
    tokens, numbers, others = parts
    assert set(tokens) == {"input_ids", "attention_mask"} and torch.equal(numbers, torch.tensor([7, 8]))
    assert others["input_ids"].tolist() == [[10, 1], [10, 11]]
    assert set(collate([{"input_ids": [5]}])) == {"input_ids"}
    batch = DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=-1)([sample(1, [1]), sample(1, [1, 2])])
    assert batch["labels"].tolist() == [[1, -1], [1, 2]]
    monkeypatch.setattr(tokenizer, "padding_side", "left")
    assert collate([sample(1, [1]), sample(2, [1, 2])])["labels"].tolist() == [[-100, 1], [1, 2]]


@pytest.mark.spec("AC-106")
@pytest.mark.spec("AC-107")
def test_a_tokenizer_without_the_tokens_is_refused(tokenizer: Any) -> None:
    bare = copy.deepcopy(tokenizer)
    bare.pad_token = None
    with pytest.raises(ValueError, match="has no pad token"):
        DataCollatorForSeq2Seq(bare)
    bare = copy.deepcopy(tokenizer)
    bare.mask_token = None
    with pytest.raises(ValueError, match="has no mask token"):
        DataCollatorForLanguageModeling(bare)
    causal = DataCollatorForLanguageModeling(bare, mlm=False, ignore_index=-7)([sample(2), sample(3)])
    assert causal["labels"].tolist() == [[10, 11, -7], [10, 11, 12]]
    assert causal["input_ids"].tolist() == [[10, 11, 1], [10, 11, 12]]


@pytest.mark.spec("AC-107")
def test_tokens_are_hidden_in_the_stated_shares(tokenizer: Any) -> None:
    torch.manual_seed(0)
    inputs = torch.randint(5, 100, (1000, 1000))  # a million tokens
    few = inputs[:100]
    shares: list[tuple[dict[str, Any], Tensor, float, float, float, float]] = [
        ({}, inputs, 0.15, 0.8, 0.1, 0.005),
        ({"apply_random_words": False}, inputs, 0.15, 0.8, 0.2, 0.005),
        ({"mlm_probability": 0.5, "masked_to_mask": 0.4, "ignore_index": -7}, few, 0.5, 0.4, 0.3, 0.015),
    ]
    for options, rows, share, masked, kept, within in shares:
        batch = DataCollatorForLanguageModeling(tokenizer, **options)([{"input_ids": row} for row in rows])
        chosen = batch["labels"] != options.get("ignore_index", -100)
        assert chosen.float().mean().item() == pytest.approx(share, abs=0.002 if rows is inputs else 0.01)
        assert torch.equal(batch["labels"][chosen], rows[chosen])
        assert torch.equal(batch["input_ids"][~chosen], rows[~chosen])
        now, before = batch["input_ids"][chosen], rows[chosen]
        assert (now == tokenizer.mask_token_id).float().mean().item() == pytest.approx(masked, abs=within)
        assert (now == before).float().mean().item() == pytest.approx(kept, abs=within)
    # 3 and 4 are special tokens; the first row is padded.
    samples = [{"input_ids": [3, *range(10, 10 + length), 4]} for length in (5, 50)]
    batch = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.99)(samples)
    hidden = batch["labels"] != -100
    assert hidden[:, 1:6].any() and not hidden[:, 0].any() and not hidden[0, 6:].any() and not hidden[1, -1]
    assert batch["attention_mask"].sum(1).tolist() == [7, 52]
    assert parameters(DataCollatorForLanguageModeling) == (
        "(tokenizer, mlm: bool = True, mlm_probability: float = 0.15, ignore_index: int = -100, "
        "masked_to_mask: float = 0.8, apply_random_words: bool = True, force_one_output: bool = False) -> None"
    )


@pytest.mark.spec("AC-108")
def test_targets_stay_beside_the_tokens_or_are_dropped(tokenizer: Any) -> None:
    pairs = [(sample(2), 1.0), (sample(3), 2.0)]
    both = DataCollatorForLanguageModeling(tokenizer)(pairs)
    assert type(both) is tuple and [type(part) for part in both] == [dict, Tensor]
    assert set(both[0]) == {"input_ids", "attention_mask", "labels"}
    assert both[0]["input_ids"].shape == (2, 3) and both[1].tolist() == [1.0, 2.0]
    alone = DataCollatorForLanguageModeling(tokenizer, force_one_output=True)(pairs)
    assert type(alone) is dict and alone["input_ids"].shape == (2, 3)


@pytest.mark.spec("AC-109")
def test_inputs_are_padded_and_labels_stacked(tokenizer: Any) -> None:
    assert parameters(DataCollatorForLongestSequence) == "(tokenizer, torch_stack: bool = True) -> None"
    pairs = [(sample(3), 0), (sample(5), 1)]
    tokens, labels = DataCollatorForLongestSequence(tokenizer)(pairs)
    assert type(tokens) is dict
    assert tokens["input_ids"].tolist() == [[10, 11, 12, 1, 1], [10, 11, 12, 13, 14]]
    assert tokens["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert isinstance(labels, Tensor) and torch.equal(labels, torch.tensor([0, 1]))
    assert DataCollatorForLongestSequence(tokenizer, torch_stack=False)(pairs)[1] == [0, 1]
    plain = DataCollatorForLongestSequence(tokenizer)([sample(1), sample(2)])
    assert type(plain) is dict
    assert plain["input_ids"].tolist() == [[10, 1], [10, 11]] and set(plain) == {"input_ids", "attention_mask"}
    with pytest.raises(Exception, match="for labels that are sequences use PadSequences"):
        DataCollatorForLongestSequence(tokenizer)([(sample(2), [0, 1]), (sample(2), [1, 1])])
