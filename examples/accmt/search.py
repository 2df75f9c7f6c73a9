"""Searches the learning rate and the batch size.

python -m trainkit.dialects run search.py
"""

from accmt import HyperParameterSearch, Scheduler, set_seed
from digits import Accuracy, DigitsDataset, DigitsModule

if __name__ == "__main__":
    set_seed(42)
    search = HyperParameterSearch(
        DigitsModule,
        DigitsDataset("train"),
        DigitsDataset("val"),
        metrics=[Accuracy("accuracy")],
        enable_checkpointing=False,
        dataloader_num_workers=0,
    )
    search.set_parameters(
        train_batch_size=[50, 100],
        eval_batch_size=297,
        epochs=1,
        learning_rate=[1e-4, 1e-2],
        scheduler={"linear": Scheduler.LinearWithWarmup, "constant": Scheduler.Constant},
    )
    search.optimize(lambda metrics: metrics["0"]["accuracy"], direction="maximize", n_trials=2)
