"""The schedule of a resumed run: as it was stored, or, when the run has other settings, evaluated with these.

A schedule is a function of its step and of the run's length. With other settings it is made again and stepped to where
the run is: the rate is that of a run with these settings from its start. `ReduceLROnPlateau` is a function of results
instead: its reductions stay, and apply to the new rate.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from trainkit.loop.changes import Changes, report
from trainkit.loop.length import total_steps, updates_in
from trainkit.loop.plan import plain
from trainkit.trainer import Totals

if TYPE_CHECKING:
    from trainkit.loop.fit import Fit


def resume(fit: Fit, changes: Changes, state: Mapping[str, Any], before: Mapping[str, Any]) -> None:
    """Puts the schedule, and what it manages in the optimizer's groups, to where the run is.

    Args:
        state: of the checkpoint.
        before: the settings in it.
    """
    rates = [float(group["lr"]) for group in state["optimizer"]["groups"]]
    if isinstance(fit.schedule, ReduceLROnPlateau):
        _resume_plateau(fit, changes, state, before)
    elif changes.schedule and not fit.max_duration.reached(fit.state):
        _evaluate(fit, changes, state)
    else:
        fit.schedule.load_state_dict(state["schedule"])
        return
    present = [float(group["lr"]) for group in fit.optimizer.param_groups]
    if present != rates:
        old, new = (", ".join(f"{rate:g}" for rate in dict.fromkeys(each)) for each in (rates, present))
        report(fit, "learning rate from step %d on: %s → %s", fit.state.step, old, new)


def _evaluate(fit: Fit, changes: Changes, state: Mapping[str, Any]) -> None:
    plan, groups = fit.plan, fit.optimizer.param_groups
    live = [dict(group) for group in groups]
    totals = _totals(fit)
    fit.schedule = plan.at(fit.optimizer, totals, _steps(fit, state))
    for group, values, changed in zip(groups, live, changes.groups, strict=True):
        group.update({key: value for key, value in values.items() if key not in changed and key not in plan.managed})


def _steps(fit: Fit, state: Mapping[str, Any]) -> int:
    """How often a run that was planned so from its start would have stepped its schedule by now."""
    if fit.manual:
        return _stored_steps(state["schedule"])
    return fit.state.epoch if fit.plan.per == "epoch" else fit.state.update - fit.state.skipped


def _stored_steps(schedule: Mapping[str, Any]) -> int:
    within = schedule.get("_schedulers", ())
    return int(schedule["last_epoch"]) if "last_epoch" in schedule or not within else _stored_steps(within[0])


def _totals(fit: Fit) -> Totals:
    """How long the schedule is: what was done, and what the duration leaves to do. That is what the run's totals are,
    unless its epochs had another number of steps before."""
    fresh, state, accumulate = fit.plan.totals, fit.state, fit.trainer.accumulate
    assert fresh is not None
    length = fit.plan.duration
    end = total_steps(fit.feed, length, state, accumulate=accumulate, by_hand=fit.manual)
    steps = fit.feed.steps(state.epoch)
    if length.unit == "up" or length.reached(state) or end is None or not steps or fit.manual:
        return fresh
    updates, epochs = updates_in(steps, state, end - state.step, accumulate)
    return Totals(state.update + updates, state.epoch + epochs, fresh.updates_per_epoch)


def _resume_plateau(fit: Fit, changes: Changes, state: Mapping[str, Any], before: Mapping[str, Any]) -> None:
    fresh = fit.schedule.state_dict()
    initial = before["schedule"]["state"] if changes.schedule else plain(fresh)
    changed = {key for key, value in plain(fresh).items() if key in initial and initial[key] != value}
    restarts = {"mode", "threshold_mode"} & changed or before.get("schedule_monitor") != fit.trainer.schedule_monitor
    if changes.schedule and restarts:
        report(fit, "ReduceLROnPlateau begins again: results so far are not comparable")
        fit.schedule.load_state_dict({**state["schedule"], **fresh})
    else:
        fit.schedule.load_state_dict({**state["schedule"], **{key: fresh[key] for key in changed}})
    for at, (group, keys) in enumerate(zip(fit.optimizer.param_groups, changes.groups, strict=False)):
        if "lr" in keys:
            reduced = float(state["optimizer"]["groups"][at]["lr"]) / before["optimizer"][at]["lr"]
            group["lr"] = group["lr"] * reduced
    fit.schedule._last_lr = [group["lr"] for group in fit.optimizer.param_groups]
