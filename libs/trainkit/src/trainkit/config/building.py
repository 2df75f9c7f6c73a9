"""A `Trainer` out of settings and the parts that only code can make."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any

from torch import nn
from torch.utils.data import Dataset

from trainkit import catalogue
from trainkit.config.components import Component
from trainkit.config.run import RunConfig
from trainkit.config.saving import SavedConfig, to_dict
from trainkit.data import Loader
from trainkit.data.loader import is_stream
from trainkit.errors import InvalidSetup
from trainkit.optim import optimizer, schedule
from trainkit.trainer import Trainer

_NOT_PASSED_ON = {
    "batch_size",
    "eval_batch_size",
    "num_workers",
    "optimizer",
    "schedule",
    "checkpoints",
    "on_change",
    "callbacks",
    "trackers",
}
_PASSED_ON = [each.name for each in fields(RunConfig) if each.name not in _NOT_PASSED_ON]

Collate = Callable[[list[Any]], Any] | None


def make_trainer(
    config: RunConfig, module: nn.Module, train: Any, evaluate: Any, collate: Collate, parts: Mapping[str, Any]
) -> Trainer:
    """See `RunConfig.trainer`."""
    _refuse_unknown(parts)
    settings: dict[str, Any] = {name: getattr(config, name) for name in _PASSED_ON}
    settings["optimizer"] = optimizer(config.optimizer.type, **config.optimizer.arguments)
    if config.schedule is not None:
        settings["schedule"] = schedule(config.schedule.type, per=config.schedule_per, **config.schedule.arguments)
    if config.checkpoints is not None:
        settings["checkpoints"] = config.checkpoints.build()
    settings["on_change"] = config.on_change.given()
    settings["parameters"] = to_dict(config)
    settings["train"] = _loader(config, train, config.batch_size, collate, shuffle=True)
    settings["evaluate"] = _evaluation(config, evaluate, collate)
    callbacks = [SavedConfig(config), *_built("callback", config.callbacks), *parts.get("callbacks", ())]
    trackers = [*_built("tracker", config.trackers), *parts.get("trackers", ())]
    return Trainer(module=module, **{**settings, **parts, "callbacks": callbacks, "trackers": trackers})


def _built(kind: str, components: Iterable[Component]) -> list[Any]:
    return [catalogue.build(kind, each.type, **each.arguments) for each in components]


def _evaluation(config: RunConfig, evaluate: Any, collate: Collate) -> Any:
    size = config.eval_batch_size or config.batch_size
    if isinstance(evaluate, Mapping):
        return {name: _loader(config, each, size, collate, shuffle=False) for name, each in evaluate.items()}
    return None if evaluate is None else _loader(config, evaluate, size, collate, shuffle=False)


def _loader(config: RunConfig, data: Any, batch_size: int, collate: Collate, *, shuffle: bool) -> Any:
    if not isinstance(data, Dataset):
        return data
    order = None if is_stream(data) else shuffle
    return Loader(data, batch_size, shuffle=order, num_workers=config.num_workers, collate=collate)


def _refuse_unknown(parts: Mapping[str, Any]) -> None:
    known = [each.name for each in fields(Trainer)]
    for name in parts:
        if name not in known:
            near = catalogue.nearest(name, known)
            raise InvalidSetup(f"a trainer takes no {name!r}" + (f"; did you mean {near}?" if near else ""))
