"""Updates of Hugging Face models are those of one batch of all samples, however targets are divided over steps and
processes."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from trainkit import Trainer
from trainkit.data import Loader
from trainkit.huggingface import HuggingFace

VOCABULARY = 12


class Tagger(nn.Module):
    """A model in small with a loss of its own."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)
        self._loss = loss

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.embedding(input_ids))
        return {"loss": self._loss(logits.view(-1, VOCABULARY), labels.view(-1)), "logits": logits}


def with_penalty(logits: Tensor, labels: Tensor) -> Tensor:
    """As mixtures of experts add theirs: in place, to the mean over targets."""
    loss = F.cross_entropy(logits, labels)
    loss += 0.1
    return loss


def by_itself(logits: Tensor, labels: Tensor) -> Tensor:
    kept = labels != -100
    return -logits.log_softmax(-1)[kept, labels[kept]].sum() / kept.sum()


def model(kind: str) -> Any:
    import transformers as hf

    small: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    bert = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8, "num_labels": 5}
    torch.manual_seed(0)
    if kind == "causal":
        made: Any = hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=8, n_layer=1, n_head=1, n_positions=16, **small))
    elif kind == "seq2seq":
        sizes = {
            "dropout_rate": 0.0,
            "d_model": 8,
            "d_kv": 8,
            "d_ff": 8,
            "num_layers": 1,
            "num_heads": 1,
            "decoder_start_token_id": 0,
        }
        made = hf.T5ForConditionalGeneration(hf.T5Config(**small, **sizes))
    elif kind == "tokens":
        made = hf.BertForTokenClassification(hf.BertConfig(**small, **bert))
    else:
        made = hf.BertForSequenceClassification(hf.BertConfig(**small, **bert))
    for part in made.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    return made


def samples(kind: str) -> list[dict[str, Tensor]]:
    """Sequences with 1 to 9 targets, in an order that gives steps and processes different numbers of them."""
    made = []
    for length in (9, 7, 1, 2, 1, 3, 8, 1, 4, 1, 2):
        tokens = 2 + torch.arange(10) * length % 9
        labels = torch.where(torch.arange(10) <= length, tokens % 5, -100)
        made.append({"input_ids": tokens, "labels": torch.tensor(length % 5) if kind == "sequences" else labels})
    return made


def by_hand(kind: str, model: Any, batch: dict[str, Tensor], smoothing: float = 0.0) -> Tensor:
    """The mean loss over all targets of the batch, from the logits."""
    output = model(**batch)
    logits, labels = output["logits"], batch["labels"]
    if kind == "causal":
        logits, labels = logits[:, :-1], labels[:, 1:]
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), label_smoothing=smoothing)


def updated(module: nn.Module, kind: str, **options: Any) -> Any:
    """After one update over all samples."""
    settings: dict[str, Any] = {
        "train": Loader(samples(kind), 4, shuffle=False),
        "accumulate": 3,
        "max_duration": "1ep",
        **options,
    }
    return Trainer(module=module, optimizer=partial(torch.optim.SGD, lr=1.0), device="cpu", **settings).fit()


def assert_exact(trained: nn.Module, fresh: Any, loss: Callable[[dict[str, Tensor]], Tensor], kind: str) -> None:
    whole = torch.utils.data.default_collate(samples(kind))
    loss(whole).backward()
    for (name, ours), theirs in zip(trained.named_parameters(), fresh.parameters(), strict=True):
        expected = theirs.detach() - (0 if theirs.grad is None else theirs.grad)
        torch.testing.assert_close(ours.detach(), expected, rtol=1e-4, atol=2e-6, msg=name)


@pytest.mark.parametrize("kind", ["causal", "seq2seq", "tokens", "sequences"])
def test_an_accumulated_update_is_the_mean_over_all_targets(kind: str) -> None:
    module, fresh = HuggingFace(model(kind)), model(kind)
    fit = updated(module, kind, evaluate=Loader(samples(kind), 4, shuffle=False), max_duration="1ep")

    fresh.train()
    assert_exact(module.model, fresh, partial(by_hand, kind, fresh), kind)
    whole = torch.utils.data.default_collate(samples(kind))
    with torch.no_grad():
        expected = float(by_hand(kind, module.model.eval(), whole))
    assert fit.results["val/loss"] == pytest.approx(expected, rel=1e-5)
    assert fit.state.tokens == {"sequences": 11, "causal": 39}.get(kind, 50)


def numbered(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A batch as collators for transformers' own trainer make it."""
    batch = torch.utils.data.default_collate(rows)
    return {**batch, "num_items_in_batch": (batch["labels"] != -100).sum()}


def test_a_number_of_items_that_a_batch_brings_does_not_count_twice(caplog: pytest.LogCaptureFixture) -> None:
    module, fresh = HuggingFace(model("causal")), model("causal")

    updated(module, "causal", train=Loader(samples("causal"), 4, shuffle=False, collate=numbered))

    fresh.train()
    assert_exact(module.model, fresh, partial(by_hand, "causal", fresh), "causal")
    assert not caplog.records


SMOOTHED = nn.CrossEntropyLoss(label_smoothing=0.1)
CASES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], dict[str, Any], float]] = {
    "label smoothing": (SMOOTHED, {}, 0.1),
    "a penalty": (with_penalty, {}, 0.0),
    "a loss of its own": (by_itself, {"count": lambda batch: (batch["labels"] != -100).sum()}, 0.0),
}


@pytest.mark.parametrize("case", CASES)
def test_models_with_a_loss_of_their_own_are_exact_too(case: str, caplog: pytest.LogCaptureFixture) -> None:
    loss, options, smoothing = CASES[case]
    module, fresh = HuggingFace(Tagger(loss), **options), Tagger(loss)

    updated(module, "tokens")

    assert_exact(module.model, fresh, partial(by_hand, "tokens", fresh, smoothing=smoothing), "tokens")
    assert not caplog.records


def test_a_loss_that_cannot_be_counted_is_weighted_by_rows_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    module, fresh = HuggingFace(Tagger(by_itself)), Tagger(by_itself)

    with caplog.at_level(logging.WARNING, "trainkit"):
        updated(module, "tokens")

    def by_rows(whole: dict[str, Tensor]) -> Tensor:
        cuts = [{key: value[at : at + 4] for key, value in whole.items()} for at in range(0, 11, 4)]
        return sum((fresh(**cut)["loss"] * len(cut["labels"]) for cut in cuts), torch.zeros(())) / 11

    assert_exact(module.model, fresh, by_rows, "tokens")
    assert [record.message for record in caplog.records] == [
        "the loss of Tagger is no mean over targets that trainkit can count, so batches are weighted by their rows: if "
        "they hold different numbers of targets, say how many with HuggingFace(..., count=...)"
    ]


def two(folder: str) -> None:
    """The last step has no sample for the second process, and some steps no target."""
    module = HuggingFace(Tagger(nn.CrossEntropyLoss()))
    data = samples("tokens")
    data[2]["labels"], data[3]["labels"] = (torch.full((10,), -100) for _ in range(2))
    updated(module, "tokens", train=Loader(data, 2, shuffle=False), accumulate=6, strategy="ddp")
    weights = {name: p.detach().reshape(-1).tolist() for name, p in module.model.named_parameters()}
    Path(folder, f"found-{os.environ['RANK']}").write_text(json.dumps(weights))


def test_two_processes_with_different_numbers_of_targets_are_exact(tmp_path: Path, forks: Any) -> None:
    forks.succeed(two, tmp_path, processes=2)

    fresh = Tagger(nn.CrossEntropyLoss())
    whole = torch.utils.data.default_collate(samples("tokens"))
    whole["labels"][2:4] = -100
    by_hand("tokens", fresh, whole).backward()
    for rank in range(2):
        found = json.loads((tmp_path / f"found-{rank}").read_text())
        for name, p in fresh.named_parameters():
            assert p.grad is not None
            torch.testing.assert_close(
                torch.tensor(found[name]), (p - p.grad).detach().reshape(-1), rtol=1e-4, atol=2e-6, msg=name
            )
