"""The state of any torch optimizer by the names of parameters, so that it can be stored in pieces and read back."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.checkpoints.tree import unescaped
from trainkit.errors import WrongCheckpoint
from trainkit.sharded import cut_like

OF_OLD_PIECES = (
    "has optimizer state in pieces of DeepSpeed without their layout, from an older trainkit: resume with the same "
    "stage and as many processes; the next checkpoint has the layout"
)
_SKIPPED = ("params", "param_names")


def read(optimizer: Optimizer, module: nn.Module, group_names: list[list[str]] | None = None) -> dict[str, Any]:
    """State and settings as a tree; its tensors are the live ones.

    Args:
        group_names: as `Strategy.group_names`.
    """
    names = {id(p): name for name, p in module.named_parameters()}
    return {
        "type": type(optimizer).__name__,
        "state": {names[id(p)]: dict(state) for p, state in optimizer.state.items() if id(p) in names},
        "groups": [
            {
                "names": [names.get(id(p), "") for p in group["params"]] if group_names is None else group_names[at],
                **{key: value for key, value in group.items() if key not in _SKIPPED},
            }
            for at, group in enumerate(optimizer.param_groups)
        ],
    }


def layout(name: str, parameters: Mapping[str, nn.Parameter]) -> Tensor | None:
    """The parameter that a stored tensor of optimizer state belongs to."""
    parts = name.split("/")  # "", "optimizer", "state", the parameter's name, the key
    return parameters.get(unescaped(parts[3])) if len(parts) > 4 and parts[2] == "state" else None


def write(
    optimizer: Optimizer,
    module: nn.Module,
    stored: Mapping[str, Any],
    path: Path,
    changed: Sequence[Collection[str]] = (),
    group_names: list[list[str]] | None = None,
) -> None:
    """Takes over what `read` returned: settings, and the state of parameters unless the optimizer updates pieces.

    Args:
        changed: for each group the settings that stay as they are, or nothing.

    Raises:
        WrongCheckpoint: it is of another optimizer, or of one with other parameters.
    """
    kind = type(optimizer).__name__
    if (before := stored.get("type", kind)) != kind:
        raise WrongCheckpoint(
            f"{path} has the state of {before} and this run has {kind}: go on with {before}, or begin another run from "
            "the checkpoint's weights (trainkit.checkpoints.export)"
        )
    present = read(optimizer, module, group_names)["groups"]
    theirs = [group["names"] for group in stored["groups"]]
    if not any(map(any, theirs)) and any(theirs):
        if group_names is None or len(theirs) != len(present):
            raise WrongCheckpoint(f"{path} {OF_OLD_PIECES}")
    elif [group["names"] for group in present] != theirs:
        raise WrongCheckpoint(f"{path} has the state of an optimizer with other parameters or groups")
    for at, (group, values) in enumerate(zip(optimizer.param_groups, stored["groups"], strict=True)):
        stays = {"names", *(changed[at] if changed else ())}
        group.update({key: value for key, value in values.items() if key not in stays})
    if group_names is None:
        put(optimizer, module, stored["state"])


def put(optimizer: Optimizer, module: nn.Module, states: Mapping[str, Mapping[str, Any]]) -> None:
    """Takes over the state of parameters, by their names; what is whole becomes a shard where the parameter is one."""
    parameters = dict(module.named_parameters())
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for name, values in states.items():
        p = parameters[name]
        optimizer.state[p] = {key: _placed(key, value, p, groups[id(p)]) for key, value in values.items()}


def _placed(key: str, value: Any, parameter: nn.Parameter, group: Mapping[str, Any]) -> Any:
    """Where torch keeps it: beside its parameter, but for step counts, which stay on the host unless told otherwise."""
    on_host = key == "step" and not (group.get("capturable") or group.get("fused"))
    if not isinstance(value, Tensor) or on_host:
        return value
    value = value.to(parameter.device)
    return cut_like(value, parameter) if value.shape == parameter.shape else value
