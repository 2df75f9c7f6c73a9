"""Builds a module without memory for its large tensors, and computes them later, a few at a time, with the same bits.

`Recording` is a mode in which the constructor of a module runs as it is. Large new tensors have no memory, and
the operations on them are recorded. Random operations also run once on memory that is freed at once, so that the
generator is where it would be, and its state before each of them is recorded. What the constructor asks of values
(`item`, an `if`) is computed for it. `values` then runs the operations that a
tensor depends on.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only

from trainkit.errors import InvalidSetup
from trainkit.initial.replacing import like

SMALLEST = 2**14
"""Tensors with fewer elements are made at once."""

_FACTORIES = {
    f"aten::{prefix}{name}"
    for prefix, names in {
        "": ("empty", "empty_strided", "zeros", "ones", "full", "rand", "randn", "randint", "normal"),
        "new_": ("empty", "empty_strided", "zeros", "ones", "full"),
    }.items()
    for name in names
}
_RANDOM_FILLS = {
    f"aten::{name}_"
    for name in ("uniform", "normal", "random", "bernoulli", "exponential", "log_normal", "cauchy", "geometric")
}
_FILLS = _RANDOM_FILLS | {"aten::zero_", "aten::fill_", "aten::copy_"}
"""Operations that write all of their first argument and do not read it."""


@dataclass(frozen=True, slots=True)
class _View:
    """A tensor as a part of the memory with this number."""

    memory: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(slots=True)
class _Operation:
    function: Callable[..., Any]
    args: Any
    kwargs: Mapping[str, Any]
    reads: frozenset[int]
    replaces: frozenset[int]
    """Memory of which nothing that was there before remains."""
    made: Mapping[int, int]
    """Number of new memory by the place of the output in it."""
    generator: torch.Generator | None
    state: Tensor | None


class Deferred(Tensor):
    """A tensor on the host without memory. It looks like any other, because torch's own initialisation does nothing for
    one on the meta device; only a `Recording` computes with it."""

    @staticmethod
    def of(meta: Tensor) -> Deferred:
        """The tensor that stands for one on the meta device, and shares its storage."""
        made: Deferred = Tensor._make_subclass(
            Deferred, meta, False, dispatch_device=True, device_for_backend_keys=torch.device("cpu")
        )
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _LOOKS:
            return _LOOKS[func](*args)
        raise InvalidSetup(
            f"{func} on a tensor that a module's constructor made: it has no values yet, so do this in the constructor"
        )


_LOOKS: Mapping[Any, Callable[..., Any]] = {
    torch.ops.prim.device.default: lambda tensor: (
        torch.device("cpu") if isinstance(tensor, Deferred) else tensor.device
    ),
    torch.ops.aten._has_compatible_shallow_copy_type.default: lambda one, other: type(one) is type(other),
}
"""What torch asks of a tensor itself. The second decides whether `tensor.data = other` is possible."""


class Recording(TorchDispatchMode):
    """Records how large tensors are made while it is entered.

    Args:
        random: also compute where random numbers are taken from. False where no random tensor will be asked for: it
            halves the time.
    """

    def __init__(self, *, random: bool = True) -> None:
        super().__init__()
        self._random = random
        self._numbers: dict[int, int] = {}
        self._memory: list[torch.UntypedStorage] = []  # kept, so that no two have one address
        self._operations: list[_Operation] = []
        self._writers: defaultdict[int, list[int]] = defaultdict(list)

    def finish(self, module: nn.Module) -> None:
        """Puts tensors on the meta device in place of a module's deferred ones."""
        plain: dict[int, Tensor] = {}
        for part in module.modules():
            for held in (part._parameters, part._buffers):
                for name, tensor in held.items():
                    if isinstance(tensor, Deferred):
                        if id(tensor) not in plain:
                            plain[id(tensor)] = like(tensor, _alias(tensor))
                        held[name] = plain[id(tensor)]  # type: ignore[assignment]

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor on the meta device was deferred."""
        return tensor.is_meta and tensor.untyped_storage()._cdata in self._numbers

    @torch.no_grad()
    def values(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The values of deferred tensors, on the host."""
        views = [self._view(tensor) for tensor in tensors]
        real = self._run({view.memory for view in views})
        return [_tensor(view, real, self._memory) for view in views]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _LOOKS:
            return _LOOKS[func](*args)
        if any(isinstance(each, Deferred) for each in tree_flatten((args, kwargs))[0]):
            return self._deferred(func, args, kwargs)
        if _is_factory(func) and torch.device(kwargs.get("device") or "cpu").type == "cpu":
            meta_args = tree_map_only(Tensor, lambda each: each.to("meta"), args)
            if func(*meta_args, **{**kwargs, "device": "meta"}).numel() >= SMALLEST:
                return self._deferred(func, args, kwargs)
        return func(*args, **kwargs)

    def _deferred(self, func: Any, args: Any, kwargs: Any) -> Any:
        written = [value for value, argument in _arguments(func, args, kwargs) if _is_written(argument)]
        written = [each for each in tree_flatten(written)[0] if isinstance(each, Tensor)]
        if torch.Tag.inplace_view in func.tags and isinstance(args[0], Deferred):  # t_, set_: another view, no values
            args[0].data = Deferred.of(self._on_meta(func, args, kwargs)[1][0])
            return args[0]
        if any(not isinstance(each, Deferred) for each in written) or _returns_plain(func):
            return func(*self._computed(args), **self._computed(kwargs))
        generator, state = self._advance(func, args, kwargs)
        output, outputs = self._on_meta(func, args, kwargs)
        made = {at: self._number(each) for at, each in enumerate(outputs) if not self.has(each)}
        changed = {self._view(each).memory for each in written}
        if made or changed:
            self._add(func, args, kwargs, made, changed, generator, state)
        return output

    def _on_meta(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, list[Tensor]]:
        """What an operation returns, without computing it; and its results on the meta device."""
        given: dict[int, Tensor] = {}

        def meta(tensor: Tensor) -> Tensor:
            alias = _alias(tensor) if isinstance(tensor, Deferred) else tensor.to("meta")
            given[id(alias)] = tensor
            return alias

        meta_args, meta_kwargs = tree_map_only(Tensor, meta, (args, dict(kwargs)))
        if "device" in kwargs or _is_factory(func):
            meta_kwargs["device"] = "meta"
        result = func(*meta_args, **meta_kwargs)
        outputs = [each for each in tree_flatten(result)[0] if isinstance(each, Tensor)]
        # What an operation in place returns is the very tensor that it was given.
        return tree_map_only(
            Tensor, lambda each: given[id(each)] if id(each) in given else Deferred.of(each), result
        ), outputs

    def _add(self, func: Any, args: Any, kwargs: Any, made: Any, changed: set[int], generator: Any, state: Any) -> None:
        held = tree_map_only(
            Tensor, lambda each: self._view(each) if isinstance(each, Deferred) else each.clone(), (args, dict(kwargs))
        )
        views = [each for each in tree_flatten(held)[0] if isinstance(each, _View)]
        replaces = set(made.values())
        reads = {each.memory for each in views}
        if func._schema.name in _FILLS and _covers(views[0], self._memory):
            replaces.add(views[0].memory)
            reads = {each.memory for each in views[1:]}
        at = len(self._operations)
        self._operations.append(
            _Operation(func, held[0], held[1], frozenset(reads), frozenset(replaces), made, generator, state)
        )
        for memory in changed | replaces:
            self._writers[memory].append(at)

    def _advance(self, func: Any, args: Any, kwargs: Any) -> tuple[torch.Generator | None, Tensor | None]:
        """Takes as many random numbers as the operation will; returns the generator and its state before."""
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return None, None
        generator = kwargs.get("generator") or torch.default_generator
        state = generator.get_state()
        if self._random and func._schema.name in _RANDOM_FILLS:
            func(torch.empty_strided(args[0].size(), args[0].stride(), dtype=args[0].dtype), *args[1:], **kwargs)
        elif self._random:
            func(*self._computed(args), **self._computed(kwargs))
        return generator, state

    def _computed(self, tree: Any) -> Any:
        return tree_map_only(Deferred, lambda each: self.values([each])[0], tree)

    def _number(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._numbers:
            self._numbers[storage._cdata] = len(self._memory)
            self._memory.append(storage)
        return self._numbers[storage._cdata]

    def _view(self, tensor: Tensor) -> _View:
        return _View(
            self._number(tensor), tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset()), tensor.dtype
        )

    def _run(self, wanted: Iterable[int]) -> dict[int, torch.UntypedStorage]:
        """Runs what this memory depends on. Generators are as before after it."""
        real: dict[int, torch.UntypedStorage] = {}
        before: dict[torch.Generator, Tensor] = {}
        for at in self._needed(wanted):
            operation = self._operations[at]
            args, kwargs = tree_map(
                lambda each: _tensor(each, real, self._memory) if isinstance(each, _View) else each,
                (operation.args, dict(operation.kwargs)),
            )
            if operation.generator is not None and operation.state is not None:
                before.setdefault(operation.generator, operation.generator.get_state())
                operation.generator.set_state(operation.state)
            outputs = tree_flatten(operation.function(*args, **kwargs))[0]
            for place, memory in operation.made.items():
                real[memory] = outputs[place].untyped_storage()
        for generator, state in before.items():
            generator.set_state(state)
        return real

    def _needed(self, wanted: Iterable[int]) -> list[int]:
        """Places of the operations that make up this memory, in their order."""
        chosen: set[int] = set()
        pending = [(memory, len(self._operations)) for memory in wanted]
        while pending:
            memory, before = pending.pop()
            writers = self._writers[memory]
            for at in reversed(writers[: bisect_left(writers, before)]):
                if at not in chosen:
                    chosen.add(at)
                    pending.extend((read, at) for read in self._operations[at].reads)
                if memory in self._operations[at].replaces:
                    break
        return sorted(chosen)


def _alias(tensor: Tensor) -> Tensor:
    """A tensor on the meta device with the same storage."""
    alias = torch.empty(0, dtype=tensor.dtype, device="meta")
    return alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


def _is_factory(func: Any) -> bool:
    return func._schema.name in _FACTORIES and any(each.name == "device" for each in func._schema.arguments)


def _arguments(func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """Values with the arguments of the schema that they are for."""
    declared = func._schema.arguments
    positional = list(zip(args, declared, strict=False))
    return positional + [(kwargs[each.name], each) for each in declared[len(args) :] if each.name in kwargs]


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _returns_plain(func: Any) -> bool:
    """Whether the result is a number, which a tensor on the meta device does not have."""
    kinds = [each.type.kind() for each in func._schema.returns]
    return bool(kinds) and "TensorType" not in kinds and "ListType" not in kinds


def _covers(view: _View, memory: Sequence[torch.UntypedStorage]) -> bool:
    count = 1
    for length in view.size:
        count *= length
    return count * view.dtype.itemsize == memory[view.memory].nbytes() and len(set(view.stride)) == len(view.stride)


def _tensor(view: _View, real: dict[int, torch.UntypedStorage], memory: Sequence[torch.UntypedStorage]) -> Tensor:
    if view.memory not in real:  # the first operation that counts writes all of it
        real[view.memory] = torch.UntypedStorage(memory[view.memory].nbytes())
    return torch.empty(0, dtype=view.dtype).set_(real[view.memory], view.offset, view.size, view.stride)
