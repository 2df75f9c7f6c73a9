"""ACCMT's public names on trainkit: `from trainkit.dialects.accmt import AcceleratorModule, Trainer`.

What differs on purpose and what is missing stands in docs/dialects/accmt.md, row by row.
"""

from trainkit.dialects.accmt.callbacks import Callback
from trainkit.dialects.accmt.extended import ExtendedAcceleratorModule
from trainkit.dialects.accmt.hyperparameters import HyperParameters, Optimizer, Scheduler
from trainkit.dialects.accmt.metrics import Metric, MetricParallel
from trainkit.dialects.accmt.module import AcceleratorModule
from trainkit.dialects.accmt.monitor import Monitor
from trainkit.dialects.accmt.states import TrainingState
from trainkit.dialects.accmt.trainer import Trainer
from trainkit.dialects.accmt.utils import set_seed

__all__ = [
    "AcceleratorModule",
    "Callback",
    "ExtendedAcceleratorModule",
    "HyperParameters",
    "Metric",
    "MetricParallel",
    "Monitor",
    "Optimizer",
    "Scheduler",
    "Trainer",
    "TrainingState",
    "set_seed",
]
