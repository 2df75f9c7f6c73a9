"""Fine-tune a transformer to tell which package of Python's standard library some lines of code are from.

The model is a folder, as `save_pretrained` writes it, with its tokenizer. Without one, a tiny BERT with random weights
is made first, so that the example needs no network; give `--model` for a real one. The tuned model is written to
`tuned`, for any program that reads Hugging Face's format.
"""

import argparse
import sysconfig
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from torchmetrics.classification import MulticlassAccuracy
from trainkit import Checkpoints, Trainer
from trainkit.data import Loader
from trainkit.huggingface import HuggingFace, PadInputs
from trainkit.optim import schedule
from trainkit.trackers import Yard

PACKAGES = ("asyncio", "email", "unittest", "xml")
LINES = 6  # of a piece
LENGTH = 64  # words that the model sees
HELD_OUT = 5  # every fifth piece


class Pieces(Dataset[dict[str, Any]]):
    """Pieces of code as a tokenizer's numbers, and the number of the package that each is from."""

    def __init__(self, pieces: list[tuple[str, int]], tokenizer: Any) -> None:
        encoded = tokenizer([text for text, _ in pieces], truncation=True, max_length=LENGTH)["input_ids"]
        self._pieces = list(zip(encoded, (label for _, label in pieces), strict=True))

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, index: int) -> dict[str, Any]:
        words, label = self._pieces[index]
        return {"input_ids": words, "attention_mask": [1] * len(words), "labels": label}


def read_pieces(each: int) -> list[tuple[str, int]]:
    """At most as many pieces of every package, and the package's number."""
    library = Path(sysconfig.get_paths()["stdlib"])
    found: list[tuple[str, int]] = []
    for label, package in enumerate(PACKAGES):
        files = sorted((library / package).rglob("*.py"))
        lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        pieces = ["\n".join(lines[at : at + LINES]) for at in range(0, len(lines), LINES)]
        found += [(piece, label) for piece in pieces[:: -(-len(pieces) // each)]]
    return found


def make_tiny_model(folder: Path, texts: list[str]) -> None:
    """A BERT of random weights, and a tokenizer that knows the most frequent words."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import TemplateProcessing
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    counted = Counter(word for text in texts for word, _ in Whitespace().pre_tokenize_str(text))
    words = {
        word: at for at, word in enumerate(["[PAD]", "[CLS]", "[UNK]", *(w for w, _ in counted.most_common(1500))])
    }
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", words["[CLS]"])])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", cls_token="[CLS]", unk_token="[UNK]")
    fast.save_pretrained(folder)
    # Small and from nothing: large first weights and no dropout let it learn within seconds.
    small = {"initializer_range": 0.1, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes = small | {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 96}
    config = BertConfig(vocab_size=len(words), max_position_embeddings=LENGTH, num_labels=len(PACKAGES), **sizes)
    BertForSequenceClassification(config).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a folder; default: a tiny model that is made here")
    parser.add_argument("--pieces", type=int, default=600, help="of each package, at most")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args()

    torch.manual_seed(0)
    pieces = read_pieces(args.pieces)
    train, held_out = [one for at, one in enumerate(pieces) if at % HELD_OUT], pieces[::HELD_OUT]
    if args.model is None:
        args.model = Path("tiny")
        make_tiny_model(args.model, [text for text, _ in train])
    module = HuggingFace.from_pretrained(
        args.model, "AutoModelForSequenceClassification", num_labels=len(PACKAGES), metrics=("accuracy",)
    )
    collate = PadInputs(module.tokenizer)
    fit = Trainer(
        module=module,
        optimizer=partial(torch.optim.AdamW, lr=args.lr),
        schedule=schedule("LinearWithWarmup", num_warmup_steps=10),
        train=Loader(Pieces(train, module.tokenizer), 32, collate=collate),
        evaluate=Loader(Pieces(held_out, module.tokenizer), 128, shuffle=False, collate=collate),
        metrics={"accuracy": MulticlassAccuracy(len(PACKAGES), average="micro")},
        max_duration=f"{args.epochs}ep",
        clip_norm=1.0,
        checkpoints=Checkpoints(keep_last=1),
        trackers=[Yard()],
        parameters=vars(args) | {"model": str(args.model)},
    ).fit()
    if fit.strategy.is_main:
        module.save_pretrained("tuned")
        print(f"held-out accuracy: {fit.results['val/accuracy']:.3f}; by chance: {1 / len(PACKAGES):.3f}")


if __name__ == "__main__":
    main()
