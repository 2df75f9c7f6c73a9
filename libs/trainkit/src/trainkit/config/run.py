"""The settings of a run that a file can hold. What only code can make (module, data) is given to `trainer`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, WithJsonSchema

from trainkit.config.components import Component, OfKind
from trainkit.durations import duration

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.data import Dataset

    from trainkit.checkpoints.policy import Checkpoints
    from trainkit.data import Loader
    from trainkit.trainer import Trainer


def _readable(text: str) -> str:
    duration(text)
    return text


_DURATION = {"type": "string", "pattern": r"^\s*[\d_e]*\s*[A-Za-z]+\s*$", "examples": ["10ep", "500st", "1e9tok"]}
DurationText = Annotated[str, AfterValidator(_readable), WithJsonSchema(_DURATION)]
"""A length such as `3ep`, `500st`, `200up`, `60000sa`, `1e9tok` or `2ev`."""

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, kw_only=True, slots=True)
class BestSettings:
    """Which checkpoint is the best one.

    Args:
        metric: a name in the results of an evaluation, such as `val/loss`.
        mode: whether the least or the greatest value is best.
    """

    metric: str
    mode: Literal["min", "max"] = "min"


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSettings:
    """When checkpoints are made and which are kept; see `trainkit.Checkpoints`.

    Args:
        folder: where they are; null is the job's folder on a yard, else `checkpoints`.
        every: how often; null makes one at the end and on SIGTERM only.
        keep_last: how many of the newest stay.
        best: keeps the best one too.
        asynchronous: training goes on while the bytes are written.
        at_end: makes one when the run ends as it should.
        resume: goes on from the newest good one if there is one, or must, or never does.
        grace_s: the longest that the end of a run waits for its last checkpoint, in seconds.
    """

    folder: str | None = None
    every: DurationText | None = "1ep"
    keep_last: Positive = 3
    best: BestSettings | None = None
    asynchronous: bool = True
    at_end: bool = True
    resume: Literal["auto", "must", "never"] = "auto"
    grace_s: Annotated[float, Field(gt=0)] = 600.0

    def build(self) -> Checkpoints:
        """The policy for a trainer."""
        from trainkit.checkpoints.policy import Best, Checkpoints

        plain = {**asdict(self), "best": Best(**asdict(self.best)) if self.best else None}
        return Checkpoints(**plain)


Accept = Literal["accept"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OnChange:
    """What may differ between a run and the checkpoint that it resumes from; null: it may not, and a difference ends
    the run with an error.

    Args:
        seed: of everything random.
        shuffle: whether the loader shuffles.
        samples: in an epoch.
        order: of the samples of an epoch.
        batch_size: samples per step; `scale` accepts as many per process as before, on another number of processes.
        drop_last: whether an epoch leaves out the smaller last batch.
        accumulate: steps of an update.
    """

    seed: Accept | None = None
    shuffle: Accept | None = None
    samples: Accept | None = None
    order: Accept | None = None
    batch_size: Literal["accept", "scale"] | None = None
    drop_last: Accept | None = None
    accumulate: Accept | None = None

    def given(self) -> dict[str, Any]:
        """As `trainkit.Trainer` takes it."""
        return {name: word for name, word in asdict(self).items() if word is not None}


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The settings of a run; see `trainkit.Trainer`. A program's own settings are fields of a subclass.

    Args:
        name: of the run, for trackers.
        seed: of everything random.
        max_duration: where training ends, for instance `10ep` or `500st`.
        batch_size: samples per step, over all processes.
        eval_batch_size: the same for evaluation; null is `batch_size`.
        num_workers: processes that load data; 0 loads in the training process.
        optimizer: a name in the catalogue, or its type with arguments.
        schedule: a name in the catalogue, or its type with arguments; null keeps the rate.
        schedule_per: how often the schedule steps.
        schedule_total: the duration that the schedule is planned for; then the rate stays. null is `max_duration`.
        schedule_monitor: the result of evaluations that ReduceLROnPlateau steps with, such as `val/loss`.
        evaluate_every: how often the evaluation sets are evaluated; null never.
        evaluate_first: also before the first step.
        evaluate_last: also at the end.
        strategy: where tensors live and how gradients meet.
        precision: of the computation.
        accumulate: steps whose gradients make one update.
        clip_norm: greatest norm of the gradient; null does not clip.
        log_every: how often the training loss goes to trackers; null never.
        checkpoints: the policy; null makes none.
        on_change: settings that may differ from those of the checkpoint that the run resumes from; see
            `trainkit.Trainer`.
        compile: compiles the module's forward.
        deterministic: refuses operations that are not repeatable bit for bit.
        non_finite: what a loss or gradient that is not finite leads to.
        out_of_memory: whether a step that does not fit is tried again, or split.
        check_sync_every: how often processes compare their weights; null never.
        callbacks: what is called around everything, in this order: names in the catalogue, or types with arguments.
        trackers: where numbers go: names in the catalogue, or types with arguments.
    """

    max_duration: DurationText
    batch_size: Positive
    optimizer: Annotated[Component, OfKind("optimizer")]
    schedule: Annotated[Component, OfKind("schedule")] | None = None
    schedule_per: Literal["update", "epoch"] = "update"
    schedule_total: DurationText | None = None
    schedule_monitor: str | None = None
    name: str = "run"
    seed: int = 0
    eval_batch_size: Positive | None = None
    num_workers: Count = 0
    evaluate_every: DurationText | None = "1ep"
    evaluate_first: bool = False
    evaluate_last: bool = True
    strategy: Literal["auto", "single", "ddp", "fsdp", "deepspeed"] = "auto"
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    accumulate: Positive = 1
    clip_norm: Annotated[float, Field(gt=0)] | None = None
    log_every: DurationText | None = "10st"
    checkpoints: CheckpointSettings | None = field(default_factory=CheckpointSettings)
    on_change: OnChange = field(default_factory=OnChange)
    compile: bool = False
    deterministic: bool = False
    non_finite: Literal["raise", "skip", "ignore"] = "raise"
    out_of_memory: Literal["raise", "retry", "split"] = "raise"
    check_sync_every: DurationText | None = None
    callbacks: tuple[Annotated[Component, OfKind("callback")], ...] = ()
    trackers: tuple[Annotated[Component, OfKind("tracker")], ...] = ()

    def trainer(
        self,
        *,
        module: nn.Module,
        train: Dataset[Any] | Loader | Iterable[Any],
        evaluate: Mapping[str, Any] | Dataset[Any] | Loader | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        **parts: Any,
    ) -> Trainer:
        """A trainer with these settings.

        Args:
            module: what is trained.
            train: a dataset, for which a loader is made from the settings, or a loader or batches of your own.
            evaluate: the same, or several by name.
            collate: makes a batch of samples, in the loaders made here.
            parts: everything else that a `Trainer` takes, such as `metrics`; `callbacks` and `trackers` come behind
                those of the settings.

        Raises:
            InvalidSetup: a part that a trainer does not take.
        """
        from trainkit.config.building import make_trainer

        return make_trainer(self, module, train, evaluate, collate, parts)
