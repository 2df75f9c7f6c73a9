"""What a checkpoint holds, and how a run goes on from one.

Shared state is the same on every process, or sharded over them; each process has state of its own beside it: its random
numbers, its part of the mean loss, its gradients when a window was cut short.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainkit import random
from trainkit.checkpoints import folder as folders
from trainkit.checkpoints.policy import Checkpoints
from trainkit.checkpoints.snapshot import SHARED, Snapshot, own_file
from trainkit.checkpoints.tree import escaped, join, names, split
from trainkit.errors import CheckpointError, DamagedCheckpoint, WrongCheckpoint
from trainkit.loop import optimizers, pieces, rescheduling, sameness, settings, unfinished
from trainkit.loop.changes import Changes, report
from trainkit.loop.parts import Tail
from trainkit.sharded import is_sharded
from trainkit.strategies.base import Strategy

if TYPE_CHECKING:
    from trainkit.loop.fit import Fit

_log = logging.getLogger("trainkit")


def take(fit: Fit, *, interrupted: bool = False) -> Snapshot:
    """The state between two steps. Tensors are the live ones.

    Args:
        interrupted: it is not one that an uninterrupted run would take: what processes keep for themselves is stored
            as it is on each.
    """
    own = _own(fit)
    if not interrupted:
        fit.strategy.settle()
    elif fit.strategy.world_size > 1:
        own["buffers"] = dict(fit.module.named_buffers())
    shared = {**_shared(fit), "interrupted": interrupted}
    logged_until = fit._trackers.cut()
    return Snapshot(fit.state.step, shared, own, dict(fit.results), logged_until)


def _shared(fit: Fit) -> dict[str, Any]:
    return {
        "state": fit.state.to_dict(),
        "about": sameness.described(fit),
        "settings": settings.described(fit),
        "model": fit.strategy.weights(),
        "extra": fit.strategy.extra_state(),
        "buffers": fit.unstored.changed(),
        "optimizer": optimizers.read(fit.optimizer, fit.module, fit.strategy.group_names),
        "schedule": fit.schedule.state_dict() if fit.schedule is not None else {},
        "precision": fit.strategy.precision.state_dict(),
        "callbacks": {each.name: state for each in fit.trainer.callbacks if (state := each.state_dict())},
        "results": fit.results,
        "train_loss": fit.train_loss,
        "grad_norm": fit.grad_norm,
        "stop_reason": fit.stop_reason,
        "left": fit.left._asdict() if fit.left is not None else None,
        "epoch_ends": fit.epoch_ends,
        "save_asked": fit._keeper is not None and fit._keeper.asked,
    }


def _own(fit: Fit) -> dict[str, Any]:
    return {
        "random": random.capture(fit.strategy.device),
        "loss": fit.loss.partial(),
        "strategy": fit.strategy.state_dict(fit.optimizer),
        "feed": fit.feed.state_dict() if hasattr(fit.feed, "state_dict") else {},
        **unfinished.take(fit),
    }


def source(strategy: Strategy, policy: Checkpoints, folder: Path) -> Path | None:
    """The checkpoint to go on from; the same one on every process. Only the first one looks.

    Raises:
        CheckpointError: the policy wants one and there is none, or wants none and there is one.
    """
    found: tuple[str | None, str | None] = (None, None)
    if strategy.is_main:
        try:
            folders.sweep(folder)
            path = _chosen(policy, folder)
            found = (str(path) if path is not None else None, None)
        except CheckpointError as error:
            found = (None, str(error))
    path_text, problem = strategy.gather(found)[0]
    if problem is not None:
        raise CheckpointError(problem)
    return _own_copy(Path(path_text)) if path_text is not None else None


def _own_copy(path: Path) -> Path:
    """Of a checkpoint that the yard has put back, every machine has one."""
    given = os.environ.get("TRAINYARD_RESUME_FROM")
    return Path(given) if given and Path(given).name == path.name else path


def _chosen(policy: Checkpoints, folder: Path) -> Path | None:
    if isinstance(policy.resume, Path):
        folders.verify(policy.resume)
        return policy.resume
    if policy.resume == "never":
        if present := folders.steps(folder):
            raise CheckpointError(
                f"{folder} has checkpoints (the last of step {present[-1]}) and resume='never': "
                "choose another folder or move them away"
            )
        return None
    given = os.environ.get("TRAINYARD_RESUME_FROM")
    if given:
        folders.verify(Path(given))
        return Path(given)
    present, damages = folders.by_preference(folder), list[DamagedCheckpoint]()
    for step in present:
        path = folder / f"step-{step}"
        try:
            folders.verify(path)
        except DamagedCheckpoint as damage:
            damages.append(damage)
        else:
            for each in damages:
                _log.warning("A checkpoint is damaged: %s. The run resumes from %s instead.", each, path)
            return path
    if present:  # starting anew would write over what may be mended
        raise DamagedCheckpoint(
            f"none of the {len(present)} checkpoint(s) in {folder} is as it was written: bring them back, or move "
            "them away to start anew"
        )
    if policy.resume == "must":
        raise CheckpointError(f"resume='must' and {folder} has no good checkpoint")
    return None


def load(fit: Fit, path: Path) -> bool:
    """Puts a run where the checkpoint at `path` was taken.

    Returns:
        Whether an uninterrupted run has it too.

    Raises:
        WrongCheckpoint: it belongs to another model, optimizer or set of callbacks.
        DamagedCheckpoint: it cannot be read.
    """
    from trainkit.checkpoints import shards

    manifest, index = folders.read_manifest(path), shards.read_index(path)
    plain, own = _read(path / SHARED), {}
    if fit.strategy.rank < manifest.world_size:
        own = _read(path / own_file(fit.strategy.rank))
    tensors = _tensors(fit, path, index, [*names(plain), *names(own)])
    state, own_state = join(plain, tensors), join(own, tensors)
    fit._trackers.resumed(manifest.logged_until)
    state.setdefault("about", {}).setdefault("world_size", manifest.world_size)  # older versions store it there alone
    changes = _apply_shared(fit, path, state)
    _apply_optimizer_state(fit, path, index, state["optimizer"]["state"], own_state, manifest.world_size)
    if manifest.world_size == fit.strategy.world_size:
        _apply_own(fit, own_state)
    else:
        _apply_others(fit, path, index, own_state, manifest.world_size)
    if "seed" in changes.accepted:
        random.seed_everything(random.mixed(fit.trainer.seed, fit.strategy.rank, fit.state.step))
    _log.info("going on from %s at step %d", path, fit.state.step)
    return not state["interrupted"]


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DamagedCheckpoint(f"{path} cannot be read: {error}") from error


def _tensors(fit: Fit, path: Path, index: Mapping[str, Any], wanted: list[str]) -> dict[str, Tensor]:
    """Reads all tensors: the model's into place, the others into new ones laid out like those that will use them."""
    from trainkit.checkpoints import shards

    live: dict[str, Tensor] = {}
    split(_shared(fit), "", live)
    models = {name: tensor for name, tensor in live.items() if name.startswith("/model/")}
    targets: dict[str, Tensor] = {name: tensor.detach() for name, tensor in models.items()}
    parameters = dict(fit.module.named_parameters())
    for name in wanted:
        if name in targets:
            continue
        if name not in index:
            raise DamagedCheckpoint(f"{path}: {name} is not in the index")
        like = optimizers.layout(name, parameters) if name.startswith("/optimizer/") else live.get(name)
        if like is not None and is_sharded(like) and list(like.shape) == index[name]["shape"]:
            targets[name] = torch.empty_like(like)
        else:
            targets[name] = shards.empty_like(index[name])
    shards.load(path, index, targets)
    return targets


def _apply_shared(fit: Fit, path: Path, state: dict[str, Any]) -> Changes:
    fit.state.load(state["state"])
    fit.state.finished = False
    changes = sameness.settle(fit, path, state)
    fit.strategy.put_weights(state["model"], state.get("extra", {}))
    fit.unstored.put(state.get("buffers", {}))
    for callback in fit.trainer.callbacks:  # before the optimizer, which has what a callback unfroze
        if callback.name in state["callbacks"]:
            callback.load_state_dict(state["callbacks"][callback.name])
    optimizers.write(fit.optimizer, fit.module, state["optimizer"], path, changes.groups, fit.strategy.group_names)
    if fit.schedule is not None:
        rescheduling.resume(fit, changes, state, state.get("settings", {}))
    fit.strategy.precision.load_state_dict(state["precision"])
    for name in state["callbacks"].keys() - {callback.name for callback in fit.trainer.callbacks}:
        report(
            fit, "changed since the checkpoint: no callback of this run is called %s, and its state is dropped", name
        )
    fit.results.update(state["results"])
    fit.train_loss = state["train_loss"]
    norm = state["grad_norm"]
    fit.grad_norm = norm.to(fit.strategy.device) if norm is not None else None
    fit.left = Tail(**state["left"]) if state["left"] is not None else None
    fit.epoch_ends = state.get("epoch_ends", False)
    if state["save_asked"]:
        fit.checkpoint()
    fit.stop_reason = state["stop_reason"]  # a run that was stopped early stays so
    if fit.stop_reason is not None:
        report(
            fit,
            "%s was stopped early (%s), and stays so: resume from an earlier checkpoint to train on",
            path,
            fit.stop_reason,
        )
    return changes


def _apply_own(fit: Fit, own: dict[str, Any]) -> None:
    _apply_every(fit, own)
    buffers = dict(fit.module.named_buffers())
    for name, value in own.get("buffers", {}).items():
        buffers[name].copy_(value)
    unfinished.put(fit, own)


def _apply_optimizer_state(
    fit: Fit, path: Path, index: Mapping[str, Any], whole: Mapping[str, Any], own: Mapping[str, Any], before: int
) -> None:
    """What processes stored beside the state of parameters: as it is, when it fits this strategy and as many processes;
    else put together and cut anew.

    Raises:
        WrongCheckpoint: an older trainkit did not store what would be needed for that.
    """
    place = fit.strategy
    fits = before == place.world_size and place.accepts(own.get("strategy", {}))
    if all(place.gather(fits)):
        return place.load_state_dict(fit.optimizer, own.get("strategy", {}))
    first = _read(path / own_file(0)).get("strategy", {})
    if first.get("pieces"):
        if "layout" not in first:
            raise WrongCheckpoint(f"{path} {optimizers.OF_OLD_PIECES}")
        shapes = {name: index[f"/model/{escaped(name)}"]["shape"] for name, _ in fit.module.named_parameters()}
        whole = pieces.assembled((_stored_by(path, index, rank, "strategy") for rank in range(before)), shapes)
    if place.group_names is not None:
        place.load_state_dict(fit.optimizer, {"pieces": pieces.cut(whole, place.layout())})
    elif first.get("pieces"):
        optimizers.put(fit.optimizer, fit.module, whole)


def _stored_by(path: Path, index: Mapping[str, Any], rank: int, *keys: str) -> Any:
    """A part of what the process of a rank stored for itself."""
    from trainkit.checkpoints import shards

    values = _read(path / own_file(rank))
    for key in keys:
        values = values[key]
    targets = {name: shards.empty_like(index[name]) for name in names(values)}
    shards.load(path, index, targets)
    return join(values, targets)


def _apply_every(fit: Fit, own: dict[str, Any]) -> None:
    """What a process takes over from the one of its rank, however many there are."""
    random.restore(own["random"], fit.strategy.device)
    fit.loss.load(own["loss"])
    if own["feed"] and hasattr(fit.feed, "load_state_dict"):
        fit.feed.load_state_dict(own["feed"])


def _apply_others(fit: Fit, path: Path, index: Mapping[str, Any], own: dict[str, Any], before: int) -> None:
    """Goes on from a checkpoint of `before` processes, which are not as many as there are now."""
    from trainkit.checkpoints import shards

    place = fit.strategy
    if not place.resizable:
        raise WrongCheckpoint(
            f"the checkpoint is of {before} process(es) and there are {place.world_size};"
            f" the pieces of {place.name} fit as many as there were: go on with as many"
        )
    _log.warning(
        "the checkpoint is of %d processes and there are %d: results agree within rounding", before, place.world_size
    )
    if own:
        _apply_every(fit, own)
    else:
        random.seed_everything(random.mixed(fit.trainer.seed, place.rank, fit.state.step))

    def plain(rank: int) -> dict[str, Any]:
        stored = _read(path / own_file(rank))
        return {key: stored[key] for key in unfinished.OF_WINDOW if key in stored}

    def everyones(rank: int) -> dict[str, Any]:
        values = plain(rank)
        targets = {name: shards.empty_like(index[name]) for name in names(values)}
        shards.load(path, index, targets)
        return dict(join(values, targets))

    unfinished.put(fit, unfinished.summed(fit, plain(0), everyones, before))
