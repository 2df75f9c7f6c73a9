"""Trains with a module that goes backward and updates by itself.

python -m trainkit.dialects run extended.py
"""

import torch.nn.functional as F
from accmt import HyperParameters, Optimizer, Scheduler, Trainer, set_seed
from accmt.modules import ExtendedAcceleratorModule
from digits import Accuracy, DigitsDataset
from torch import nn


class ManualModule(ExtendedAcceleratorModule):
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch):
        images, labels = batch
        loss = F.cross_entropy(self.model(images), labels)
        self.backward(loss)
        self.step()
        self.zero_grad()
        return loss

    def validation_step(self, key, batch):
        images, labels = batch
        logits = self.model(images)
        return {"loss": F.cross_entropy(logits, labels), "accuracy": (logits.argmax(dim=-1), labels)}


if __name__ == "__main__":
    set_seed(42)
    hps = HyperParameters(
        epochs=2,
        batch_size=(50, 297),
        optimizer=Optimizer.AdamW,
        optim_kwargs={"lr": 1e-2},
        scheduler=Scheduler.LinearWithWarmup,
        scheduler_kwargs={"warmup_ratio": 0.1},
    )
    metrics = [Accuracy("accuracy")]
    trainer = Trainer(hps, "runs/extended", metrics=metrics, dataloader_num_workers=0)
    trainer.fit(ManualModule(), DigitsDataset("train"), DigitsDataset("val"))
    print(f"accuracy: {trainer.state.additional_metrics['0']['accuracy']:.3f}")
