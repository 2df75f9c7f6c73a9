"""ACCMT's public names on trainkit: `from trainkit.dialects.accmt import AcceleratorModule, Trainer`.

What differs on purpose and what is missing is in docs/dialects/accmt.md, row by row. `names.toml` lists the names of
the release that the dialect follows; `replaced.toml` says what to use for names of other releases.
"""

from trainkit.dialects import replaced
from trainkit.dialects.accmt.accelerator import accelerator, allow_tf32, autocast, autocast_, precision
from trainkit.dialects.accmt.callbacks import Callback
from trainkit.dialects.accmt.collate_fns import (
    DataCollatorForLanguageModeling,
    DataCollatorForLongestSequence,
    DataCollatorForSeq2Seq,
)
from trainkit.dialects.accmt.dataloader_samplers import TemperatureSampler
from trainkit.dialects.accmt.decorators import (
    on_last_process,
    on_local_main_process,
    on_local_process,
    on_main_process,
    on_process,
)
from trainkit.dialects.accmt.evaluator import Evaluator
from trainkit.dialects.accmt.hp_search import HyperParameterSearch
from trainkit.dialects.accmt.hyperparameters import HyperParameters, Optimizer, Scheduler
from trainkit.dialects.accmt.metrics import Metric, MetricParallel
from trainkit.dialects.accmt.modules import AcceleratorModule, ExtendedAcceleratorModule
from trainkit.dialects.accmt.monitor import Monitor
from trainkit.dialects.accmt.states import TrainingState
from trainkit.dialects.accmt.tqdm import tqdm
from trainkit.dialects.accmt.trainer import Trainer
from trainkit.dialects.accmt.utility import IS_CPU, IS_GPU, prepare, prepare_array, prepare_dataframe
from trainkit.dialects.accmt.utils import get_seed, set_seed

__all__ = [
    "IS_CPU",
    "IS_GPU",
    "AcceleratorModule",
    "Callback",
    "DataCollatorForLanguageModeling",
    "DataCollatorForLongestSequence",
    "DataCollatorForSeq2Seq",
    "Evaluator",
    "ExtendedAcceleratorModule",
    "HyperParameterSearch",
    "HyperParameters",
    "Metric",
    "MetricParallel",
    "Monitor",
    "Optimizer",
    "Scheduler",
    "TemperatureSampler",
    "Trainer",
    "TrainingState",
    "accelerator",
    "allow_tf32",
    "autocast",
    "autocast_",
    "get_seed",
    "on_last_process",
    "on_local_main_process",
    "on_local_process",
    "on_main_process",
    "on_process",
    "precision",
    "prepare",
    "prepare_array",
    "prepare_dataframe",
    "set_seed",
    "tqdm",
]

__getattr__ = replaced.getter(__name__, "accmt")
