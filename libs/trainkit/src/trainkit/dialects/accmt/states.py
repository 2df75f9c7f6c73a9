"""How far a run is, in this dialect's words."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from math import inf
from pathlib import Path
from typing import Any


@dataclass
class TrainingState:
    """How far a run is. The run writes it; module and callbacks read it through a `StateView`."""

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
    finished: bool = False
    num_checkpoints_made: int = 0
    best_valid_loss: float = inf
    model_savings: dict[str, float] = field(default_factory=dict)
    val_key: str = ""

    def reset(self) -> None:
        """As at the beginning; the object stays the same for whoever holds it."""
        self.load_json(TrainingState().to_json())

    def update(
        self,
        *,
        global_step: int | None = None,
        train_step: int | None = None,
        val_step: int | None = None,
        epoch: int | None = None,
        is_end_of_epoch: bool | None = None,
        is_last_training_batch: bool | None = None,
        is_last_validation_batch: bool | None = None,
        is_last_epoch: bool | None = None,
        evaluations_done: int | None = None,
        additional_metrics: dict[str, dict[str, float]] | None = None,
        patience_left: dict[str, int] | None = None,
        best_train_loss: float | None = None,
        finished: bool | None = None,
        num_checkpoints_made: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Sets the fields that are given and not None; `kwargs` with other names are ignored."""
        given = {name: value for name, value in locals().items() if name not in ("self", "kwargs")} | kwargs
        known = {each.name for each in fields(self)}
        for name, value in given.items():
            if value is not None and name in known:
                setattr(self, name, value)

    def to_dict(self) -> dict[str, Any]:
        """All fields by name."""
        return asdict(self)

    def from_dict(self, _dict: Mapping[str, Any]) -> None:
        """Sets the fields that a mapping has."""
        self.update(**_dict)

    def save(self, to: str | Path, _dict: Mapping[str, Any] | None = None) -> None:
        """Writes all fields, or `_dict` instead, into a JSON file."""
        Path(to).write_text(json.dumps(self.to_dict() if _dict is None else dict(_dict), indent=2), "utf-8")

    def load(self, path: str | Path) -> None:
        """Sets the fields from a file of `save`."""
        self.from_dict(json.loads(Path(path).read_text("utf-8")))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def load_json(self, text: str) -> None:
        """Takes over what `to_json` returned."""
        for name, value in json.loads(text).items():
            setattr(self, name, value)


class StateView(TrainingState):
    """A live view of a state that cannot be written. The mappings that it returns are copies.

    Raises:
        AttributeError: on every attempt to set a field.
    """

    def __init__(self, state: TrainingState) -> None:
        vars(self)["state"] = state

    def __getattribute__(self, name: str) -> Any:
        if name not in _FIELDS:
            return object.__getattribute__(self, name)
        value = getattr(vars(self)["state"], name)
        return copy.deepcopy(value) if isinstance(value, dict) else value

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"the state of a run cannot be written, not even {name!r}: keep values of your own in attributes of the "
            "module or the callback"
        )


_FIELDS = frozenset(each.name for each in fields(TrainingState))
