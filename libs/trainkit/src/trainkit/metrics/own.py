"""Metrics of your own: one method that sees all rows of a set at once, or those of one process.

    class Hits(WholeSet):
        def score(self, logits, labels):
            return (logits.argmax(-1) == labels).float().mean()

Rows of uneven last batches count once each, and `WholeSet` sees them in the order of the set.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from trainkit.errors import InvalidSetup, InvalidStep

Score = Tensor | float | Mapping[str, Tensor | float]


class _Collected:
    """Batches of rows, as they come.

    Args:
        cast: floating tensors are kept in this type; a name such as `float32` is as good. None: as they are.
        check: whether shapes are compared when a batch is added.

    Raises:
        InvalidSetup: the name is no floating type.
    """

    def __init__(self, *, cast: torch.dtype | str | None = torch.float32, check: bool = True) -> None:
        found = getattr(torch, cast, None) if isinstance(cast, str) else cast
        if found is not None and not (isinstance(found, torch.dtype) and found.is_floating_point):
            raise InvalidSetup(f"cast={cast!r} is no floating type: use for instance 'float32', 'bfloat16' or None")
        if isinstance(cast, str) and found is None:
            raise InvalidSetup(f"cast={cast!r} is no type of torch's: use for instance 'float32', 'bfloat16' or None")
        self._cast, self._check = found, check
        self._device = torch.device("cpu")
        self._batches: list[list[Tensor]] = []
        self._structure: Any = None

    @abstractmethod
    def score(self, *values: Any) -> Score:
        """The value over the rows in `values`, whose parts are those of `evaluation_step`, each with rows first; or
        several values by name."""

    def update(self, *values: Any) -> None:
        """Adds one batch: tensors, or mappings of tensors, with rows along their first dimension.

        Raises:
            InvalidStep: tensors of different numbers of rows, or of other shapes than before.
        """
        flat, self._structure = tree_flatten(values)
        leaves = [self._kept(leaf) for leaf in flat]
        if self._check:
            self._compare(leaves)
        self._batches.append(leaves)

    def reset(self) -> None:
        """Forgets all batches."""
        self._batches, self._structure = [], None

    def to(self, device: torch.device) -> Any:
        """Says where values are gathered."""
        self._device = torch.device(device)
        return self

    def _kept(self, leaf: Any) -> Tensor:
        tensor: Tensor = torch.as_tensor(leaf).detach()
        return tensor.to(self._cast) if self._cast is not None and tensor.is_floating_point() else tensor

    def _compare(self, leaves: list[Tensor]) -> None:
        name, shapes = type(self).__name__, [tuple(leaf.shape) for leaf in leaves]
        if len({shape[:1] for shape in shapes}) > 1 or () in shapes:
            raise InvalidStep(f"{name}, batch {len(self._batches)}: numbers of rows differ: shapes {shapes}")
        before = [tuple(leaf.shape) for leaf in self._batches[0]] if self._batches else shapes
        if [shape[1:] for shape in shapes] != [shape[1:] for shape in before]:
            raise InvalidStep(f"{name}, batch {len(self._batches)}: shapes {shapes} do not go with {before} before")

    def _scored(self, batches: Sequence[list[Tensor]], structure: Any) -> dict[str, float]:
        columns = [
            torch.cat(column) if column[0].ndim else torch.stack(column) for column in zip(*batches, strict=True)
        ]
        score = self.score(*tree_unflatten(columns, structure))
        named = score if isinstance(score, Mapping) else {"": score}
        try:
            return {key: float(value) for key, value in named.items()}
        except (TypeError, ValueError, RuntimeError):
            raise InvalidStep(f"{type(self).__name__}.score has to return a number, or numbers by name") from None


class WholeSet(_Collected):
    """A metric whose `score` sees all rows of the set, in the set's order, on the first process alone."""

    def compute(self) -> float | Mapping[str, float]:
        """The score over the rows of all processes; the same everywhere.

        Raises:
            InvalidStep: no process has a row, or `score` did not return numbers.
        """
        batches, structure = self._all()
        if not batches:
            raise InvalidStep(f"{type(self).__name__}: the evaluation set has no rows")
        answer: list[Any] = [None]
        if _rank() == 0:
            try:
                answer = [self._scored(batches, structure)]
            except Exception as error:  # told to the others, which would wait for an answer forever
                if _world() == 1:
                    raise
                answer = [InvalidStep(f"{type(self).__name__}.score failed: {error!r}")]
        if _world() > 1:
            dist.broadcast_object_list(answer, device=self._device)
        if isinstance(answer[0], Exception):
            raise answer[0]
        return _single(answer[0])

    def _all(self) -> tuple[list[list[Tensor]], Any]:
        """The batches of all processes, by step and then by rank: a step's rows are divided among ranks in order."""
        if _world() == 1:
            return self._batches, self._structure
        about = [[(tuple(leaf.shape), leaf.dtype) for leaf in batch] for batch in self._batches]
        every: list[Any] = [None] * _world()
        dist.all_gather_object(every, (about, self._structure))
        columns = [self._column(at, [each[0] for each in every]) for at in range(_width(every))]
        by_rank = [list(zip(*(column[rank] for column in columns), strict=True)) for rank in range(_world())]
        steps = itertools.zip_longest(*by_rank)
        batches = [list(batch) for step in steps for batch in step if batch is not None]
        return batches, next((structure for shapes, structure in every if shapes), None)

    def _column(self, at: int, every: list[list[Any]]) -> list[list[Tensor]]:
        """One tensor of every batch of every process, by rank."""
        sizes = [sum(_elements(batch[at][0]) for batch in batches) for batches in every]
        dtype = next(batch[at][1] for batches in every for batch in batches)
        mine = [batch[at].to(self._device).reshape(-1) for batch in self._batches]
        padded = torch.zeros(max(sizes), dtype=dtype, device=self._device)
        if mine:
            padded[: sizes[_rank()]] = torch.cat(mine)
        gathered = [torch.empty_like(padded) for _ in every]
        dist.all_gather(gathered, padded)
        return [_cut(flat, [batch[at][0] for batch in batches]) for flat, batches in zip(gathered, every, strict=True)]


class PerProcess(_Collected):
    """A metric whose `score` sees the rows of one process; the mean over processes counts rows.

    Cheaper than `WholeSet`, and the same only when the score is a mean over rows.
    """

    def compute(self) -> float | Mapping[str, float]:
        """The mean over processes, weighted by their rows; the same everywhere.

        Raises:
            InvalidStep: no process has a row, or `score` did not return numbers.
        """
        rows = sum(batch[0].shape[0] if batch[0].ndim else 1 for batch in self._batches)
        mine = (rows, self._scored(self._batches, self._structure) if self._batches else {})
        every: list[Any] = [mine] * _world()
        if _world() > 1:
            dist.all_gather_object(every, mine)
        counted = [(weight, scores) for weight, scores in every if weight]
        if not counted:
            raise InvalidStep(f"{type(self).__name__}: the evaluation set has no rows")
        total = sum(weight for weight, _ in counted)
        return _single({key: sum(weight * scores[key] for weight, scores in counted) / total for key in counted[0][1]})


def _single(values: Mapping[str, float]) -> float | Mapping[str, float]:
    return values[""] if set(values) == {""} else values


def _elements(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _cut(flat: Tensor, shapes: list[tuple[int, ...]]) -> list[Tensor]:
    sizes = [_elements(shape) for shape in shapes]
    parts = torch.split(flat[: sum(sizes)], sizes) if sizes else ()
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def _width(every: list[Any]) -> int:
    return max((len(shapes[0]) for shapes, _ in every if shapes), default=0)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
