"""Handwritten digits of scikit-learn, and what the scripts here share."""

import torch
import torch.nn.functional as F
from accmt import AcceleratorModule
from accmt.metrics import Metric
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset


class DigitsDataset(Dataset):
    """Images as rows of 64 numbers: 1,200 to train on, 297 to validate, 300 to test."""

    PARTS = {"train": slice(0, 1200), "val": slice(1200, 1497), "test": slice(1497, None)}

    def __init__(self, part):
        digits = load_digits()
        self.images = torch.tensor(digits.data[self.PARTS[part]], dtype=torch.float32) / 16
        self.labels = torch.tensor(digits.target[self.PARTS[part]])

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]


class Accuracy(Metric):
    def compute(self, predictions, references):
        return {"accuracy": (predictions == references).float().mean().item()}


class DigitsModule(AcceleratorModule):
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch):
        images, labels = batch
        return F.cross_entropy(self.model(images), labels)

    def validation_step(self, key, batch):
        return self.test_step(batch)

    def test_step(self, batch):
        images, labels = batch
        logits = self.model(images)
        return {"loss": F.cross_entropy(logits, labels), "accuracy": (logits.argmax(dim=-1), labels)}
