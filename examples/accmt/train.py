"""Trains from a YAML file and evaluates the best model on the test set.

python -m trainkit.dialects run train.py
"""

import argparse

from accmt import Monitor, Trainer, accelerator, set_seed
from accmt.callbacks import Callback
from accmt.decorators import on_main_process
from accmt.evaluator import Evaluator
from accmt.tqdm import tqdm
from accmt.utility import MASTER_PROCESS
from digits import Accuracy, DigitsDataset, DigitsModule


class Announce(Callback):
    @on_main_process
    def on_evaluation_end(self):
        tqdm.write(f"epoch {self.state.epoch}: {self.state.additional_metrics['0']['accuracy']:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", default="runs/digits")
    arguments = parser.parse_args()

    set_seed(42)
    module = DigitsModule()
    trainer = Trainer(
        hps_config="hps.yaml",
        model_path=arguments.model_path,
        monitor=Monitor(learning_rate=True, grad_norm=True),
        metrics=[Accuracy("accuracy")],
        callbacks=[Announce()],
        gradient_checkpointing=True,
        dataloader_num_workers=0,
    )
    trainer.register_model_saving("best_accuracy")
    trainer.fit(module, DigitsDataset("train"), DigitsDataset("val"))

    evaluator = Evaluator(metrics=Accuracy("accuracy"), batch_size=100, num_workers=0)
    results = evaluator.evaluate(module, DigitsDataset("test"))
    accelerator.wait_for_everyone()
    if MASTER_PROCESS:
        print(f"parameters: {len(module)}, test accuracy: {results['accuracy']:.3f}")
