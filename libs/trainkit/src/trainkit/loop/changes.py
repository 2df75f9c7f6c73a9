"""What differs between the settings of a run and those in the checkpoint that it resumes from, and who decides.

What decides which samples come next stays as in the checkpoint: another value is an error unless the trainer accepts
it. Everything else is as the code says, and each difference is logged in one line, old → new.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.errors import WrongCheckpoint
from trainkit.loop.settings import CHECKPOINT_DECIDES, CODE_DECIDES, same_factors

if TYPE_CHECKING:
    from trainkit.loop.fit import Fit

_log = logging.getLogger("trainkit")

_NEW_STATE = {
    "amsgrad": "max_exp_avg_sq",
    "centered": "grad_avg",
    "momentum": "momentum_buffer",
    "beta1": "exp_avg",
}
"""Settings that make an optimizer keep more for each parameter, and what."""
_STARTS_LATER = ("SGD",)
"""Optimizers that begin to keep it at any update."""


@dataclass
class Changes:
    """What a resumed run takes from its code in place of its checkpoint.

    Attributes:
        known: the checkpoint says what it was made with.
        accepted: what the checkpoint decides and the trainer accepted all the same.
        groups: for each parameter group the settings that were changed: the code's count.
        schedule: the schedule is another function of the step than before.
    """

    known: bool = True
    accepted: set[str] = field(default_factory=set)
    groups: list[set[str]] = field(default_factory=list)
    schedule: bool = False


def compare(fit: Fit, path: Path, now: Mapping[str, Any], before: Mapping[str, Any]) -> Changes:
    """Compares two descriptions of a run.

    Args:
        path: of the checkpoint.
        now: the run's.
        before: the checkpoint's.

    Raises:
        WrongCheckpoint: a setting differs that the checkpoint decides, or the optimizer has other parameter groups.
    """
    changes = Changes(known="optimizer" in before)
    changes.accepted = _settle(fit, path, now, before)
    if not changes.known:
        report(
            fit,
            "%s does not store the settings that it was made with, so changes cannot be found: its optimizer settings "
            "and schedule count, and the next checkpoint stores them",
            path,
        )
        return changes
    changes.groups = [set(_changed(new, old)) for new, old in _groups(path, now, before)]
    _refuse_missing_state(fit, path, changes, now["optimizer"])
    for name in CODE_DECIDES:
        if name in before and before[name] != now[name]:
            _report_changed(fit, name, before[name], now[name])
    _report_groups(fit, changes, now["optimizer"], before["optimizer"])
    _report_callbacks(fit, now["callbacks"], before["callbacks"])
    if now["schedule"] is not None and before["schedule"] is not None:
        changes.schedule = _schedule(fit, now, before)
    return changes


def report(fit: Fit, text: str, *values: Any) -> None:
    """Logs a line, on the first process."""
    if fit.strategy.is_main:
        _log.warning(text, *values)


def _report_changed(fit: Fit, name: str, old: Any, new: Any) -> None:
    report(fit, "changed since the checkpoint: %s: %s → %s", name, old, new)


# What the checkpoint decides


def _settle(fit: Fit, path: Path, now: Mapping[str, Any], before: Mapping[str, Any]) -> set[str]:
    both = [name for name in CHECKPOINT_DECIDES if name in before and name in now]
    different = [name for name in both if before[name] != now[name]]
    if set(different) & {"seed", "shuffle", "samples"} or not (
        fit.state.position or before.get("world_size") == now["world_size"]
    ):  # another order follows from the former; that of an epoch which has not begun may depend on the processes
        different = [name for name in different if name != "order"]
    accepted = {name for name in different if _accepts(fit, name, now, before)}
    if refused := [name for name in different if name not in accepted]:
        raise WrongCheckpoint(_refusal(path, refused, now, before))
    if "accumulate" in accepted and fit.state.window:
        raise WrongCheckpoint(
            f"{path} was taken after {fit.state.window} steps of a window of {before['accumulate']}: resume with "
            f"accumulate={before['accumulate']}, and change it after the next checkpoint"
        )
    for name in different:
        _report_changed(fit, name, before[name], now[name])
    return accepted


def _accepts(fit: Fit, name: str, now: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    word = fit.trainer.on_change.get(name)
    if word == "scale":
        return bool(now[name] * before.get("world_size", 0) == before[name] * now["world_size"])
    return word == "accept"


def _refusal(path: Path, refused: list[str], now: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    values = [f"{name}={before[name]!r} in the checkpoint and {now[name]!r} in this run" for name in refused]
    accepting = ", ".join(f"{name!r}: 'accept'" for name in refused)
    text = (
        f"{path} was made with other settings: {'; '.join(values)}. They decide which samples each step gets, so the "
        f"run would be another one: use the checkpoint's, or accept the change with Trainer(on_change={{{accepting}}})"
    )
    if "batch_size" in refused and before.get("world_size", now["world_size"]) != now["world_size"]:
        text += (
            f". batch_size counts the samples of all processes, which were {before['world_size']} and are "
            f"{now['world_size']}; on_change={{'batch_size': 'scale'}} keeps the samples per process"
        )
    if refused == ["order"]:
        text += ". An order or a sampler has to follow from the epoch and its generator alone"
    return text


# What the code decides


def _groups(
    path: Path, now: Mapping[str, Any], before: Mapping[str, Any]
) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    new, old = now["optimizer"], before["optimizer"]
    for at in range(max(len(new), len(old))):
        is_, was = (each[at]["names"] if at < len(each) else [] for each in (new, old))
        if is_ != was:
            here, there = (
                f"{', '.join(names[:3]) or 'none'}{', ...' if len(names) > 3 else ''}" for names in (is_, was)
            )
            raise WrongCheckpoint(
                f"{path} has the state of an optimizer with other parameters or groups: {len(old)} group(s) there and "
                f"{len(new)} here; group {at} has the parameters {there} there and {here} here. Give the optimizer the "
                "same groups (freezing a parameter takes it out), or begin another run from the checkpoint's weights "
                "(trainkit.checkpoints.export)"
            )
    return iter(zip(new, old, strict=True))


def _changed(new: Mapping[str, Any], old: Mapping[str, Any]) -> Iterator[str]:
    return (key for key in new if key != "names" and key in old and new[key] != old[key])


def _refuse_missing_state(fit: Fit, path: Path, changes: Changes, groups: list[dict[str, Any]]) -> None:
    kind = type(fit.optimizer).__name__
    for keys, group in zip(changes.groups, groups, strict=True):
        for key in keys & _NEW_STATE.keys():
            if group[key] and kind not in _STARTS_LATER and fit.state.update:
                raise WrongCheckpoint(
                    f"{path} was made without {key}, and {kind} with {key}={group[key]} needs {_NEW_STATE[key]} of "
                    f"every parameter, which it does not have: resume without {key}, or begin another run from the "
                    "checkpoint's weights (trainkit.checkpoints.export)"
                )


def _report_groups(fit: Fit, changes: Changes, new: list[dict[str, Any]], old: list[dict[str, Any]]) -> None:
    for key in sorted(set[str]().union(*changes.groups)):
        values = [(was[key], group[key]) for group, was in zip(new, old, strict=True) if key in group and key in was]
        if all(each == values[0] for each in values):
            _report_changed(fit, key, *values[0])
            continue
        for at, (group, was) in enumerate(zip(new, old, strict=True)):
            if key in changes.groups[at]:
                _report_changed(fit, f"{key} of group {at} ({group['names'][0]}, ...)", was[key], group[key])


def _report_callbacks(fit: Fit, new: Mapping[str, Any], old: Mapping[str, Any]) -> None:
    for name in old.keys() | new.keys():
        was, is_ = old.get(name, {}), new.get(name, {})
        for key in [key for key in is_ if key in was and was[key] != is_[key]]:
            _report_changed(fit, f"{key} of {name}", was[key], is_[key])


def _schedule(fit: Fit, now: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Whether the schedule is another one than that of the checkpoint."""
    new, old = now["schedule"], before["schedule"]
    lines = [(path.rpartition("/")[2], was, is_) for path, was, is_ in _differences(new, old) if _is_setting(path)]
    named = [each for at, each in enumerate(lines) if each not in lines[:at]]  # several groups have the same
    for key, was, is_ in named:
        _report_changed(fit, f"{key} of {type(fit.schedule).__name__}", was, is_)
    same = same_factors(fit.schedule, before["factors"])
    if (
        new == old
        and same
        and now["totals"] != before["totals"]
        and not before["factors"]
        and fit.plan.per != "evaluation"
    ):
        report(fit, "%s has no setting that follows from the run's length, and stays", type(fit.schedule).__name__)
    if not same and not named:
        report(fit, "the function of %s is another one than in the checkpoint", type(fit.schedule).__name__)
    moved = any(now[key] != before[key] for key in ("totals", "schedule_per", "schedule_monitor"))
    return new != old or not same or moved


def _differences(new: Any, old: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(new, Mapping) and isinstance(old, Mapping):
        for key in [key for key in new if key in old]:
            yield from _differences(new[key], old[key], f"{path}/{key}")
    elif isinstance(new, list) and isinstance(old, list) and any(isinstance(each, Mapping) for each in new):
        for at, (one, other) in enumerate(zip(new, old, strict=False)):
            yield from _differences(one, other, f"{path}/{at}")
    elif new != old:
        yield path, old, new


def _is_setting(path: str) -> bool:
    """Whether a difference is one that a user made: rates follow from those of the groups, which were reported."""
    key = path.rpartition("/")[2]
    return key == "_milestones" or not (key.startswith("_") or key == "base_lrs")
