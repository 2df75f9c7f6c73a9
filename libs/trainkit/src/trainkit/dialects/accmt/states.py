"""How far a run is, in this dialect's words."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from math import inf


@dataclass
class TrainingState:
    """One live object for module and callbacks. Users read it; the run writes it."""

    global_step: int = 0
    train_step: int = 0
    val_step: int = 0
    epoch: int = 0
    is_end_of_epoch: bool = False
    is_last_training_batch: bool = False
    is_last_validation_batch: bool = False
    is_last_epoch: bool = False
    evaluations_done: int = 0
    additional_metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    patience_left: dict[str, int] = field(default_factory=dict)
    best_train_loss: float = inf
    best_valid_loss: float = inf
    model_savings: dict[str, float] = field(default_factory=dict)
    finished: bool = False
    num_checkpoints_made: int = 0
    val_key: str = ""

    def reset(self) -> None:
        """As at the beginning; the object stays the same for whoever holds it."""
        self.load_json(TrainingState().to_json())

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def load_json(self, text: str) -> None:
        """Takes over what `to_json` returned."""
        for name, value in json.loads(text).items():
            setattr(self, name, value)
