"""Models given by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import default_collate
from trainkit.dialects.accmt.metrics import Metric
from trainkit.errors import InvalidStep

from libs.trainkit.tests.dialects.accmt.bowl import hps, logged, trainer


class Labelled(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": torch.tensor([index % 3 + 1, 5]), "labels": torch.tensor(index % 2)}


class Hits(Metric):
    def compute(self, logits: Tensor, labels: Tensor) -> dict[str, float]:
        assert logits.shape == (16, 3)
        return {"hits": float((logits.argmax(-1) == labels).float().mean())}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    from transformers import BertConfig, BertForSequenceClassification, BertModel, BertTokenizer

    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    config = BertConfig(vocab_size=10, max_position_embeddings=8, num_labels=2, **sizes)
    made = tmp_path_factory.mktemp("bert")
    BertForSequenceClassification(config).save_pretrained(made / "head")
    (made / "words.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcde"]))
    BertTokenizer(str(made / "words.txt")).save_pretrained(made / "head")
    BertModel(config).save_pretrained(made / "bare")
    return str(made)


@pytest.mark.spec("AC-006")
@pytest.mark.spec("AC-069")
def test_a_model_is_given_by_its_folder_alone_or_with_a_class(folder: str, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, BertForNextSentencePrediction

    data, options = Labelled(), {"num_labels": 3, "ignore_mismatched_sizes": True}
    named = (f"{folder}/head", "AutoModelForSequenceClassification")
    made = trainer(tmp_path / "named", hps(epochs=1), metrics=Hits("hits"))
    made.fit(named, data, data, **options)
    assert made.state.global_step == 2 and 2 in logged(tmp_path / "named", "hits")
    files = {path.name for path in (tmp_path / "named" / "best_valid_loss").iterdir()}
    assert files >= {"best.json", "config.json", "model.safetensors", "tokenizer_config.json"}
    saved = AutoModelForSequenceClassification.from_pretrained(tmp_path / "named" / "best_valid_loss").eval()
    assert saved.classifier.out_features == 3
    loss = saved(**default_collate([data[at] for at in range(len(data))])).loss.item()  # the model's own
    assert logged(tmp_path / "named", "val_loss") == {2: pytest.approx(loss, rel=1e-5)}
    other: list[Any] = ["AutoModelForNextSentencePrediction", BertForNextSentencePrediction]
    for at, kind in enumerate([None, *other]):
        trainer(tmp_path / str(at), hps(epochs=1)).fit((named[0], kind) if kind else named[0], data, None)
        config = json.loads((tmp_path / str(at) / "best_train_loss" / "config.json").read_text())
        assert config["architectures"] == ["BertForNextSentencePrediction" if kind else "BertForSequenceClassification"]
    with pytest.raises(ValueError, match=r"AutoModelForSequenceClasification.*did you mean"):
        trainer(tmp_path / "wrong").fit((named[0], "AutoModelForSequenceClasification"), data)
    headless = [{"input_ids": data[at]["input_ids"]} for at in range(8)]
    with pytest.raises(InvalidStep, match=r"fit\(\('.*bare', 'AutoModelForSequenceClassification'\)"):
        trainer(tmp_path / "headless", hps(max_steps=1)).fit(f"{folder}/bare", headless)
    with pytest.raises(TypeError, match="fit takes an AcceleratorModule"):
        trainer(tmp_path / "x").fit(3, data)  # type: ignore[arg-type]
