"""Samplers that draw with weights."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Sampler

from trainkit.config.reading import read_yaml
from trainkit.errors import InvalidSetup
from trainkit.random import mixed

_TARGETS = ("label", "target")


class BaseSampler(ABC):
    """Makes a sampler once the processes are known. `Trainer(sampler=...)` calls it."""

    @abstractmethod
    def __call__(self, accelerator: Any) -> Sampler[int]:
        """The sampler of one process."""


class DistributedWeightedRandomSampler(Sampler[int]):
    """Draws indices with weights; each process draws from indices of its own.

    Args:
        accelerator: says the process and their number.
        weights: one for each index; their sum does not matter.
        num_samples: how many each process draws.
        replacement: whether an index may be drawn again.
        generator: of random numbers; None: torch's own. Several processes need one that all have seeded alike.

    Raises:
        InvalidSetup: a number or the weights are invalid, or several processes have no generator.
    """

    def __init__(
        self,
        accelerator: Any,
        weights: Sequence[float],
        num_samples: int,
        replacement: bool = True,
        generator: torch.Generator | None = None,
    ) -> None:
        if isinstance(num_samples, bool) or not isinstance(num_samples, int) or num_samples < 1:
            raise InvalidSetup(f"num_samples has to be a whole number of at least 1, not {num_samples!r}")
        if not isinstance(replacement, bool):
            raise InvalidSetup(f"replacement has to be True or False, not {replacement!r}")
        every = torch.as_tensor(weights, dtype=torch.float32)
        if every.ndim != 1:
            raise InvalidSetup(f"weights are one number for each index, not of shape {tuple(every.shape)}")
        if accelerator.num_processes > 1 and generator is None:
            raise InvalidSetup("several processes need a generator: seed one alike on all of them")
        self._indices = torch.arange(len(every))[accelerator.process_index :: accelerator.num_processes]
        self.weights, self.num_samples = every[self._indices], num_samples
        self.replacement, self.generator = replacement, generator
        self._seed = None if generator is None else generator.initial_seed()

    def set_epoch(self, epoch: int) -> None:
        """Makes the draws follow from the generator's seed and the epoch."""
        if self.generator is not None and self._seed is not None:
            self.generator.manual_seed(mixed(self._seed, epoch))

    def __iter__(self) -> Iterator[int]:
        drawn = torch.multinomial(self.weights, self.num_samples, self.replacement, generator=self.generator)
        return iter(self._indices[drawn].tolist())

    def __len__(self) -> int:
        return self.num_samples


class TemperatureSampler(BaseSampler):
    """Draws rare classes more often: a class with the share p of all samples is drawn with a weight of p^(1/T).

    Args:
        dataset: samples by index.
        temperature: T. 1 keeps the shares; with 100 all classes come about equally often.
        distribution: the number of samples by class, or a JSON, YAML or CSV file of them; None counts them.
        target_format: gives a sample's class; None: its last element, or its `label` or `target`, else its last entry.
        seed: of the draws; None: they follow from the trainer's seed.
        use_threads: has no effect; counting takes one pass.

    Raises:
        InvalidSetup: the class of a sample cannot be found, or the file cannot be read.
    """

    def __init__(
        self,
        dataset: Any,
        temperature: float,
        distribution: Mapping[Any, int] | str | None = None,
        target_format: Callable[[Any], Any] | None = None,
        seed: int | None = None,
        use_threads: bool = True,
    ) -> None:
        if temperature <= 0:
            raise InvalidSetup(f"temperature has to be above 0, not {temperature!r}")
        self.dataset, self.temperature, self.seed, self.use_threads = dataset, temperature, seed, use_threads
        self.distribution = _read(distribution) if isinstance(distribution, str) else distribution
        self.target_format = target_format or _target

    def __call__(self, accelerator: Any) -> DistributedWeightedRandomSampler:
        classes = [_name(self.target_format(self.dataset[index])) for index in range(len(self.dataset))]
        counts = {_name(each): count for each, count in (self.distribution or Counter(classes)).items()}
        total = sum(counts.values())
        missing = next((name for name in classes if name not in counts), None)
        if missing is not None:
            raise InvalidSetup(f"distribution has no count for the class {missing!r}")
        # The weight of a class is divided among its samples.
        weights = {name: (count / total) ** (1 / self.temperature) / count for name, count in counts.items()}
        generator = None if self.seed is None else torch.Generator().manual_seed(self.seed)
        return DistributedWeightedRandomSampler(
            accelerator, [weights[name] for name in classes], len(classes), generator=generator
        )


def _name(found: Any) -> str:
    """A class as text: files have no other keys, and tensors of equal value are different keys."""
    return str(found.item() if hasattr(found, "item") else found)


def _target(sample: Any) -> Any:
    if isinstance(sample, Mapping):
        return sample[next((key for key in sample if key in _TARGETS), list(sample)[-1])]
    if isinstance(sample, Sequence) and not isinstance(sample, str):
        return sample[-1]
    raise InvalidSetup(f"a sample is a {type(sample).__name__}: say by target_format which class it has")


def _read(path: str) -> Mapping[Any, int]:
    text = Path(path).read_text("utf-8")
    match Path(path).suffix:
        case ".json":
            found = json.loads(text)
        case ".yaml" | ".yml":
            found = read_yaml(text, path).data
        case ".csv":  # the last two columns are the class and its count; the first line names them
            rows = [line.split(",") for line in text.splitlines()[1:] if line.strip()]
            found = {row[-2].strip(): int(row[-1]) for row in rows}
        case other:
            raise InvalidSetup(f"distribution={path!r}: files end in .json, .yaml or .csv, not in {other!r}")
    if not isinstance(found, Mapping):
        raise InvalidSetup(f"{path} is no mapping of classes to counts")
    return found
