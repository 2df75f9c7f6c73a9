"""The tensors of a module, by submodules."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers, tied ones under each of their names."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of a module itself, without those of its submodules."""
    held = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in held.items() if tensor is not None}


def children_first(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All submodules by their first name, each behind those within it: the order in which constructors end."""
    paths = {id(each): path for path, each in module.named_modules()}
    done: set[int] = set()

    def visit(part: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if id(part) not in done:
            done.add(id(part))
            for child in part.children():
                yield from visit(child)
            yield paths[id(part)], part

    return visit(module)
