"""Models given by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from trainkit.dialects.accmt.metrics import Metric
from trainkit.errors import InvalidStep

from libs.trainkit.tests.dialects.accmt.bowl import hps, logged, trainer


class Labelled(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": torch.tensor([index % 3 + 1, 5]), "labels": torch.tensor(index % 3)}


class Hits(Metric):
    def compute(self, logits: Tensor, labels: Tensor) -> dict[str, float]:
        assert logits.shape == (16, 3)
        return {"hits": float((logits.argmax(-1) == labels).float().mean())}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    from transformers import BertConfig, BertForSequenceClassification, BertModel

    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    config = BertConfig(vocab_size=10, max_position_embeddings=8, num_labels=2, **sizes)
    made = tmp_path_factory.mktemp("bert")
    BertForSequenceClassification(config).save_pretrained(made / "head")
    BertModel(config).save_pretrained(made / "bare")
    return str(made)


@pytest.mark.spec("AC-006")
def test_a_model_is_given_by_its_folder_alone_or_with_a_class(folder: str, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    data, options = Labelled(), {"num_labels": 3, "ignore_mismatched_sizes": True}
    named = (f"{folder}/head", "AutoModelForSequenceClassification")
    made = trainer(tmp_path / "named", hps(epochs=1), metrics=Hits("hits"))
    made.fit(named, data, data, **options)
    assert made.state.global_step == 2 and 2 in logged(tmp_path / "named", "hits")
    saved = AutoModelForSequenceClassification.from_pretrained(tmp_path / "named" / "best_valid_loss")
    assert saved.classifier.out_features == 3
    trainer(tmp_path / "class", hps(max_steps=1)).fit((named[0], type(saved)), data, None, **options)
    two = [{**data[at], "labels": data[at]["labels"] % 2} for at in range(8)]
    trainer(tmp_path / "alone", hps(max_steps=1)).fit(named[0], two, None)
    with pytest.raises(ValueError, match=r"AutoModelForSequenceClasification.*did you mean"):
        trainer(tmp_path / "wrong").fit((named[0], "AutoModelForSequenceClasification"), data)
    headless = [{"input_ids": data[at]["input_ids"]} for at in range(8)]
    with pytest.raises(InvalidStep, match=r"fit\(\('.*bare', 'AutoModelForSequenceClassification'\)"):
        trainer(tmp_path / "headless", hps(max_steps=1)).fit(f"{folder}/bare", headless)
    with pytest.raises(TypeError, match="fit takes an AcceleratorModule"):
        trainer(tmp_path / "x").fit(3, data)  # type: ignore[arg-type]
