"""Hugging Face models and collators, with tiny models that are made here and saved in folders."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from trainkit.callbacks import KeepBest
from trainkit.data import Loader
from trainkit.errors import InvalidSetup, InvalidStep
from trainkit.huggingface import HuggingFace, LanguageModel, PadInputs, PadSequences
from trainkit.initial.values import make
from trainkit.initial.weights import Weights
from trainkit.metrics import WholeSet
from trainkit.trainer import Trainer

WORDS = ["[PAD]", "[UNK]", "[MASK]", "[CLS]", "[SEP]", *(f"word{at}" for at in range(95))]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    model = Tokenizer(WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="[UNK]"))
    names = {"pad_token": "[PAD]", "mask_token": "[MASK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=model, unk_token="[UNK]", **names)


@pytest.fixture(scope="module")
def folder(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import BertConfig, BertForSequenceClassification

    made = tmp_path_factory.mktemp("bert")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    torch.manual_seed(0)
    BertForSequenceClassification(BertConfig(vocab_size=len(WORDS), **sizes, **no_dropout)).save_pretrained(made)
    tokenizer.save_pretrained(made)
    return made


class Sentences(torch.utils.data.Dataset[Any]):
    """Sentences of different lengths; the label is in their first word."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = [5 + index % 3, *range(10, 12 + index % 4)]
        return {"input_ids": tokens, "attention_mask": [1] * len(tokens), "labels": index % 3}


class Accuracy(WholeSet):
    def score(self, logits: torch.Tensor, labels: torch.Tensor) -> float:
        return float((logits.argmax(-1) == labels).float().mean())


def test_a_model_by_folder_trains_and_its_best_weights_load_with_transformers(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    kind = "AutoModelForSequenceClassification"
    module = HuggingFace.from_pretrained(
        folder, kind, num_labels=3, metrics=("accuracy",), ignore_mismatched_sizes=True
    )
    assert module.tokenizer is not None
    collate = PadInputs(module.tokenizer)
    fit = Trainer(
        module=module,
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
        train=Loader(Sentences(), 8, collate=collate),
        evaluate=Loader(Sentences(), 10, shuffle=False, collate=collate),
        metrics={"accuracy": Accuracy()},
        max_duration="8ep",
        callbacks=[KeepBest("val/accuracy", tmp_path / "best", mode="max")],
        device="cpu",
    ).fit()
    assert fit.results["val/accuracy"] == 1.0
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "best")
    batch = collate([Sentences()[at] for at in range(6)])
    assert again.config.num_labels == 3
    assert (again(**batch).logits.argmax(-1) == batch["labels"]).all()
    assert len(AutoTokenizer.from_pretrained(tmp_path / "best")) == len(WORDS)
    assert not list((tmp_path / "best").glob("*.bin"))


def test_the_configuration_says_the_class_when_none_is_given(folder: Path) -> None:
    from transformers import BertForSequenceClassification

    assert isinstance(HuggingFace.from_pretrained(folder).model, BertForSequenceClassification)
    assert isinstance(
        HuggingFace.from_pretrained(folder, BertForSequenceClassification).model, BertForSequenceClassification
    )


BY_NAME = """
from trainkit.huggingface import HuggingFace
module = HuggingFace.from_pretrained("somebody/tiny")
print(type(module.model).__name__, len(module.tokenizer))
"""


def test_a_model_is_had_by_its_name_on_the_hub(folder: Path, tmp_path: Path) -> None:
    cached = tmp_path / "hub" / "models--somebody--tiny"  # as the hub's client keeps what it fetched
    shutil.copytree(folder, cached / "snapshots" / "abc")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "HF_HUB_CACHE": str(tmp_path / "hub")}
    done = subprocess.run([sys.executable, "-c", BY_NAME], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == f"BertForSequenceClassification {len(WORDS)}\n", done.stderr


def test_what_is_saved_reads_back_equal(folder: Path, tmp_path: Path) -> None:
    module = HuggingFace.from_pretrained(folder)
    module.save_pretrained(tmp_path)
    again = HuggingFace.from_pretrained(tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".safetensors"}
    assert all(torch.equal(again.state_dict()[name], value) for name, value in module.state_dict().items())


def test_recomputed_activations_leave_the_gradients_as_they_are(folder: Path, tokenizer: Any) -> None:
    batch = PadInputs(tokenizer)([Sentences()[at] for at in range(4)])
    batch["labels"] %= 2
    plain, saving = (HuggingFace.from_pretrained(folder, recompute=each).train() for each in (False, True))
    assert saving.model.is_activation_checkpointing and not plain.model.is_activation_checkpointing
    for module in (plain, saving):
        module.training_step(batch).sum.backward()
    for (name, one), other in zip(plain.named_parameters(), saving.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=name)


def test_errors_say_what_to_do(folder: Path, tokenizer: Any) -> None:
    with pytest.raises(InvalidSetup, match="did you mean AutoModelForSequenceClassification"):
        HuggingFace.from_pretrained(folder, "AutoModelForSequenceClasification")
    with pytest.raises(InvalidSetup, match="no model is called"):
        HuggingFace.from_pretrained(folder / "nothing")
    headless = HuggingFace.from_pretrained(folder, "AutoModel")
    with pytest.raises(InvalidStep, match="BertModel returned no loss: name a class with a head"):
        headless.training_step({"input_ids": torch.tensor([[5, 6]])})
    with pytest.raises(InvalidStep, match="batches that are mappings, not list"):
        headless.training_step([1])  # type: ignore[arg-type]


def sample(length: int, labels: Any = None) -> dict[str, Any]:
    tokens = list(range(10, 10 + length))
    return {"input_ids": tokens, "attention_mask": [1] * length} | ({} if labels is None else {"labels": labels})


@pytest.mark.spec("AC-106")
def test_sequences_and_their_labels_are_padded_to_the_longest(tokenizer: Any) -> None:
    collate = PadSequences(tokenizer)
    batch = collate([sample(3, [1, 2]), sample(5, [1, 2, 3, 4])])
    assert batch["input_ids"].shape == (2, 5)
    assert batch["labels"][0].tolist() == [1, 2, -100, -100]
    assert batch["attention_mask"][0].tolist() == [1, 1, 1, 0, 0]
    tokens, numbers = collate([(sample(3), 7), (sample(5), 7)])
    assert tokens["input_ids"].shape == (2, 5) and torch.equal(numbers, torch.tensor([7, 7]))


def test_padding_is_on_the_tokenizer_s_side_and_needs_a_pad_token(tokenizer: Any) -> None:
    tokenizer.padding_side = "left"
    try:
        assert PadInputs(tokenizer)([sample(1), sample(2)])["input_ids"].tolist() == [[0, 10], [10, 11]]
    finally:
        tokenizer.padding_side = "right"
    pad, tokenizer.pad_token = tokenizer.pad_token, None
    try:
        with pytest.raises(InvalidSetup, match="has no pad token"):
            PadInputs(tokenizer)
    finally:
        tokenizer.pad_token = pad


@pytest.mark.spec("AC-109")
def test_one_label_for_each_sequence_is_stacked(tokenizer: Any) -> None:
    tokens, labels = PadInputs(tokenizer)([(sample(3), 0), (sample(5), 1)])
    assert tokens["input_ids"].shape == (2, 5) and torch.equal(labels, torch.tensor([0, 1]))
    assert PadInputs(tokenizer, stack=False)([(sample(3), 0), (sample(5), 1)])[1] == [0, 1]
    with pytest.raises(InvalidStep, match="use PadSequences"):
        PadInputs(tokenizer)([(sample(3), [0, 1])])


@pytest.mark.spec("AC-107")
def test_tokens_are_hidden_in_the_stated_shares(tokenizer: Any) -> None:
    torch.manual_seed(0)
    inputs = torch.randint(5, 100, (1000, 1000))  # a million tokens
    samples = [{"input_ids": row} for row in inputs]
    batch = LanguageModel(tokenizer)(samples)
    chosen = batch["labels"] != -100
    assert chosen.float().mean().item() == pytest.approx(0.15, abs=0.002)
    assert torch.equal(batch["labels"][chosen], inputs[chosen])
    now, before = batch["input_ids"][chosen], inputs[chosen]
    assert (now == tokenizer.mask_token_id).float().mean().item() == pytest.approx(0.8, abs=0.005)
    assert (now == before).float().mean().item() == pytest.approx(0.1, abs=0.005)
    still = LanguageModel(tokenizer, random_words=False)(samples)
    chosen = still["labels"] != -100
    assert (still["input_ids"][chosen] == inputs[chosen]).float().mean().item() == pytest.approx(0.2, abs=0.005)


def test_special_tokens_and_padding_are_never_hidden(tokenizer: Any) -> None:
    torch.manual_seed(0)
    samples = [{"input_ids": [3, *range(10, 10 + length), 4]} for length in (5, 50)]
    batch = LanguageModel(tokenizer, probability=0.99, label_fill=-1)(samples)
    special = batch["input_ids"].new_tensor([[3, 4]])
    assert (batch["labels"][:, 0] == -1).all() and batch["input_ids"][0, 0] == special[0, 0]
    assert (batch["labels"][0, 7:] == -1).all() and (batch["input_ids"][0, 7:] == 0).all()


def test_a_causal_model_gets_its_own_inputs_as_labels(tokenizer: Any) -> None:
    batch = LanguageModel(tokenizer, masked=False)([sample(2), sample(3)])
    assert batch["labels"].tolist() == [[10, 11, -100], [10, 11, 12]]
    assert batch["input_ids"].tolist() == [[10, 11, 0], [10, 11, 12]]


@pytest.mark.spec("AC-108")
def test_targets_stay_beside_the_tokens_unless_only_those_are_wanted(tokenizer: Any) -> None:
    pairs = [(sample(2), 1.0), (sample(3), 2.0)]
    tokens, targets = LanguageModel(tokenizer)(pairs)
    assert set(tokens) == {"input_ids", "attention_mask", "labels"} and targets.tolist() == [1.0, 2.0]
    assert isinstance(LanguageModel(tokenizer, inputs_only=True)(pairs), dict)


def test_a_model_by_its_configuration_starts_in_shards_as_transformers_makes_or_reads_it(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    config = LlamaConfig(vocab_size=150, tie_word_embeddings=True, **sizes)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    torch.manual_seed(5)
    made, saved = AutoModelForCausalLM.from_config(config), AutoModelForCausalLM.from_pretrained(tmp_path)
    factory = partial(HuggingFace.from_config, tmp_path, "AutoModelForCausalLM")

    for weights, expected in ((None, made), (Weights(tmp_path), saved)):
        module, initial = make(factory, 5, weights, sharded=True)
        assert initial is not None
        assert sum(p.is_meta for p in module.parameters()) == 15
        initial.fill(module, torch.device("cpu"))
        ours = module.model.state_dict() | dict(module.model.named_buffers())
        theirs = expected.state_dict() | dict(expected.named_buffers())
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
        assert module.model.lm_head.weight is module.model.model.embed_tokens.weight
