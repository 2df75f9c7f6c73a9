"""One peer's loop over the data of `_paired`, in the environment of `trainers.txt`. Prints what was measured as JSON.

Each peer trains as its own documentation says, with what can be switched off switched off; `logs` adds a callback and
the loss logged at every step, to a logger that keeps the rows in a list.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F
from _paired import IMAGES, LEARNING_RATE, SMALL, Batch, Paired, Work, settle
from torch import Tensor, nn


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)


def ignite(module: nn.Module, data: Paired, logs: bool) -> None:
    from ignite.engine import Engine, Events, create_supervised_trainer

    trainer = create_supervised_trainer(module, sgd(module), F.cross_entropy)
    if logs:
        rows: list[Any] = []
        trainer.add_event_handler(Events.ITERATION_COMPLETED, counter())

        @trainer.on(Events.ITERATION_COMPLETED)
        def log(engine: Engine) -> None:
            rows.append((engine.state.iteration, engine.state.output))

    trainer.run(data, max_epochs=1, epoch_length=len(data))


def counter() -> Callable[..., None]:
    seen = [0]

    def count(*_: Any) -> None:
        seen[0] += 1

    return count


def fabric(module: nn.Module, data: Paired, logs: bool) -> None:
    from lightning.fabric import Fabric

    rows = Rows()
    fabric = Fabric(accelerator="cpu", devices=1, loggers=[rows.logger()] if logs else None, callbacks=[rows])
    module, optimizer = fabric.setup(module, sgd(module))
    for step, (inputs, labels) in enumerate(data):
        loss = F.cross_entropy(module(inputs), labels)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if logs:
            fabric.call("on_step_end")
            fabric.log("loss", loss, step)


class Rows:
    """A callback and a logger, of Lightning's kinds."""

    def __init__(self) -> None:
        self.on_step_end = counter()

    def logger(self) -> Any:
        from lightning.fabric.loggers.logger import Logger

        class Kept(Logger):
            rows: list[Any] = []
            name, version, save_dir = "kept", 0, None

            def log_metrics(self, metrics: Any, step: int | None = None) -> None:
                self.rows.append((step, metrics))

            def log_hyperparams(self, *_: Any, **__: Any) -> None:
                pass

        return Kept()


def accelerate(module: nn.Module, data: Paired, logs: bool) -> None:
    from accelerate import Accelerator
    from accelerate.tracking import GeneralTracker

    class Kept(GeneralTracker):
        name, requires_logging_directory = "kept", False

        def __init__(self) -> None:
            super().__init__(_blank=True)
            self.rows: list[Any] = []

        @property
        def tracker(self) -> Any:
            return self.rows

        def store_init_configuration(self, values: Any) -> None:
            pass

        def log(self, values: Any, step: int | None = None, **_: Any) -> None:
            self.rows.append((step, values))

    accelerator = Accelerator(cpu=True, log_with=[Kept()] if logs else None)
    if logs:
        accelerator.init_trackers("bench")
    module, optimizer = accelerator.prepare(module, sgd(module))
    for step, (inputs, labels) in enumerate(data):
        with accelerator.accumulate(module):
            loss = F.cross_entropy(module(inputs), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if logs:
            accelerator.log({"loss": loss.item()}, step=step)


def lightning(module: nn.Module, data: Paired, logs: bool) -> None:
    import lightning as L

    class Net(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = module

        def training_step(self, batch: Batch, index: int) -> Tensor:
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            if logs:
                self.log("loss", loss, on_step=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self.net)

    class Counted(L.Callback):
        def __init__(self) -> None:
            self.count = counter()

        def on_train_batch_end(self, *_: Any) -> None:
            self.count()

    off = {"enable_progress_bar": False, "enable_checkpointing": False, "enable_model_summary": False}
    on: dict[str, Any] = {"logger": Rows().logger(), "callbacks": [Counted()], "log_every_n_steps": 1, **off}
    trainer = L.Trainer(accelerator="cpu", devices=1, max_epochs=1, **(on if logs else {"barebones": True}))
    trainer.fit(Net(), data)


def transformers(module: nn.Module, data: Paired, logs: bool) -> None:
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = module

        def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": F.cross_entropy(self.net(inputs), labels)}

    class Named:
        """The batches as this trainer wants them: by name."""

        def __len__(self) -> int:
            return len(data)

        def __iter__(self) -> Any:
            return ({"inputs": inputs, "labels": labels} for inputs, labels in data)

    class OnData(Trainer):
        def get_train_dataloader(self) -> Any:
            return Named()

    class Counted(TrainerCallback):
        def __init__(self) -> None:
            self.count = counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.count()

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=len(data),
            max_grad_norm=0.0,
            logging_strategy="steps" if logs else "no",
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        model = Model()
        trainer = OnData(
            model=model,
            args=arguments,
            train_dataset=torch.utils.data.TensorDataset(torch.empty(len(data))),
            optimizers=(sgd(model), None),
            callbacks=[Counted()] if logs else None,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()


PEERS = {
    "Ignite": ignite,
    "Fabric": fabric,
    "Accelerate": accelerate,
    "Lightning": lightning,
    "Transformers": transformers,
}


def measured(peer: str, work: Work, pairs: int, logs: bool) -> dict[str, float]:
    data = Paired(work, pairs)
    PEERS[peer](work.module(), data, logs)
    return asdict(data.measured())


def main() -> None:
    peer, work, pairs, logs = sys.argv[1:]
    warnings.simplefilter("ignore")
    settle()
    found = measured(peer, {"MLP": SMALL, "ResNet-20": IMAGES}[work], int(pairs), logs == "logs")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
