"""Trains with an optimizer, a schedule and a collate function of the module's own.

python -m trainkit.dialects run schedule.py
"""

import torch
from accmt import HyperParameters, Optimizer, Trainer, set_seed
from accmt.modules import AcceleratorModule
from digits import DigitsDataset, DigitsModule


class ScheduledModule(DigitsModule):
    def collate_fn_train(self, batch):
        images, labels = torch.utils.data.default_collate(batch)
        return images + 0.05 * torch.randn_like(images), labels

    def training_step(self, batch):
        self.log_({"rate": self.optimizer.param_groups[0]["lr"]}, step=self.state.global_step)
        return super().training_step(batch)

    def get_optimizer(self):
        return Optimizer.AdamW(self.model.parameters(), lr=1e-2)

    def get_scheduler(self, optimizer, steps_per_epoch, epochs):
        total = steps_per_epoch * epochs
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / total) ** 2)


if __name__ == "__main__":
    set_seed(42)
    module = ScheduledModule()
    assert isinstance(module, AcceleratorModule)
    trainer = Trainer(HyperParameters(epochs=2, batch_size=100), "runs/schedule", dataloader_num_workers=0)
    trainer.fit(module, DigitsDataset("train"), DigitsDataset("val"))
    print(f"steps: {trainer.state.global_step}, last rate: {module.scheduler.get_last_lr()[0]:g}")
