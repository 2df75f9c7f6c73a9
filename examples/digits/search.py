"""Search for the learning rate and the batch size of `with_trainkit.py`, with a job of the yard for each trial.

Runs with `yard up` and then `python search.py`; `yard jobs` shows the trials. Started again, it goes on where it was.
"""

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainkit.search import Choice, Jobs, Search, Task, Uniform
from trainyard import Client


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What `with_trainkit.py` is told.

    Args:
        lr: the greatest learning rate.
        batch_size: of all workers together.
        epochs: how long a trial trains.
    """

    lr: float = 3e-3
    batch_size: int = 64
    epochs: int = 5


def job(task: Task[Settings]) -> dict[str, Any]:
    """The job of a trial."""
    options = [f"--{name.replace('_', '-')}={value}" for name, value in asdict(task.config).items()]
    return {
        "apiVersion": "trainyard.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": f"digits-trial-{task.number}", "labels": {"search": "digits"}},
        "spec": {
            "command": ["python", "with_trainkit.py", *options],
            "code": {"path": str(Path(__file__).parent), "exclude": ["study/"]},
            "resources": {"cpu": 1, "memory": "2Gi"},
            "deadline": "30m",
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()
    with Client() as yard:
        result = Search(
            config=Settings(epochs=args.epochs),
            space={"lr": Uniform(1e-4, 1e-1, log=True), "batch_size": Choice((32, 64, 128))},
            run=Jobs(yard, job, "val/accuracy"),
            folder="study",
            direction="maximize",
        ).optimize(args.trials, workers=args.at_once)
    print(f"accuracy: {result.value:.4f} with lr={result.config.lr:.2g}, batch_size={result.config.batch_size}")


if __name__ == "__main__":
    main()
