"""torch's DataLoader as training data: its order is drawn from (seed, epoch), so that a run resumes within an epoch."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler
from trainkit import Callback, Checkpoints
from trainkit.data import Loader
from trainkit.data.feed import feed
from trainkit.errors import InvalidData, InvalidSetup, WrongCheckpoint
from trainkit.loop.fit import Fit

from libs.trainkit.tests.data.seen import SLOWLY, Seen, resumed, seen
from libs.trainkit.tests.slope import trainer

NUMBERS = TensorDataset(torch.arange(22.0))
WEIGHTS = [1.0] * 11 + [0.0] * 11


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


SAMPLERS: dict[str, Callable[[], Any]] = {
    "sequential": lambda: SequentialSampler(NUMBERS),
    "list": lambda: [3, 1, 4, 15, 9, 2, 6],
    "random": lambda: RandomSampler(NUMBERS),
    "random, of its own generator": lambda: RandomSampler(NUMBERS, generator=seeded(5)),
    "random, with replacement": lambda: RandomSampler(NUMBERS, replacement=True, num_samples=30),
    "random, more than there are": lambda: RandomSampler(NUMBERS, num_samples=30),
    "weighted": lambda: WeightedRandomSampler(WEIGHTS, 15),
    "weighted, without replacement": lambda: WeightedRandomSampler(WEIGHTS, 10, replacement=False),
    "subset": lambda: SubsetRandomSampler(range(5, 20), generator=seeded(6)),
    "distributed": lambda: DistributedSampler(
        NUMBERS, int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0")), seed=4
    ),
}


def loader(name: str, **options: Any) -> DataLoader[Any]:
    if name == "shuffle":
        return DataLoader(NUMBERS, 4, shuffle=True, **options)
    if name == "batches":
        return DataLoader(NUMBERS, batch_sampler=BatchSampler(RandomSampler(NUMBERS), 3, drop_last=True), **options)
    return DataLoader(NUMBERS, 4, sampler=SAMPLERS[name](), **options)


ALL = ["shuffle", "batches", *SAMPLERS]


@pytest.mark.parametrize("name", ALL)
def test_a_run_that_resumes_within_an_epoch_reads_the_rest_of_the_same_order(name: str, tmp_path: Path) -> None:
    whole = seen(lambda: loader(name)).batches

    assert resumed(lambda: loader(name), tmp_path, len(whole) // 2 + 1) == whole
    assert resumed(lambda: loader(name), tmp_path / "first", 1) == whole


def test_each_sampler_reads_what_it_stands_for() -> None:
    def first_epoch(name: str) -> list[float]:
        return seen(lambda: loader(name), max_duration="1ep").samples

    assert first_epoch("sequential") == list(range(22))
    assert first_epoch("list") == [3, 1, 4, 15, 9, 2, 6]
    assert sorted(first_epoch("shuffle")) == sorted(first_epoch("random")) == list(range(22))
    assert first_epoch("random") != list(range(22))
    assert len(first_epoch("batches")) == 21
    assert len(first_epoch("random, with replacement")) == len(first_epoch("random, more than there are")) == 30
    assert len(set(first_epoch("random, more than there are"))) == 22
    assert max(first_epoch("weighted")) < 11
    assert len(set(first_epoch("weighted, without replacement"))) == 10
    assert sorted(first_epoch("subset")) == list(range(5, 20))


def test_orders_differ_by_epoch_and_by_seed_and_those_of_a_generator_by_its_own_seed() -> None:
    def order(make: Callable[[], Any], seed: int = 0) -> list[float]:
        return seen(make, seed=seed).samples

    shuffled, own = order(lambda: loader("shuffle")), order(lambda: loader("random, of its own generator"))
    assert shuffled[:22] != shuffled[22:]
    assert own[:22] != own[22:]
    assert order(lambda: loader("shuffle"), seed=1) != shuffled
    assert order(lambda: loader("random, of its own generator"), seed=1) == own
    assert order(lambda: DataLoader(NUMBERS, 4, shuffle=True, generator=seeded(5))) == own
    assert order(lambda: DataLoader(NUMBERS, 4, shuffle=True, generator=seeded(6))) != own


def on_processes(folder: str) -> None:
    rank, found = os.environ["RANK"], {}
    for at, name in enumerate(ALL):
        place = Path(folder) / str(at)
        whole = seen(lambda name=name: loader(name)).batches
        again = resumed(lambda name=name: loader(name), place, len(whole) // 2 + 1)
        own = [*DistributedSampler(NUMBERS, 2, int(rank), seed=4)] if name == "distributed" else None
        found[name] = {"whole": whole, "resumed": again, "own": own}
    (Path(folder) / f"seen-{rank}").write_text(json.dumps(found))


def test_two_processes_divide_each_order_and_resume_within_it(tmp_path: Path, forks: Any) -> None:
    forks.succeed(on_processes, tmp_path, processes=2)

    ranks = [json.loads((tmp_path / f"seen-{rank}").read_text()) for rank in range(2)]
    for name in ALL:
        whole = [rank[name]["whole"] for rank in ranks]
        assert [rank[name]["resumed"] for rank in ranks] == whole, name
        if name in ("shuffle", "random", "sequential"):
            steps = len(whole[0]) // 2
            read = [sample for batches in whole for batch in batches[:steps] for sample in batch]
            assert sorted(read) == list(range(22)), name
            assert [len(batch) for batch in whole[0][:steps]] == [4, 4, 3]
    for rank in ranks:
        own, batches = rank["distributed"]["own"], rank["distributed"]["whole"]
        assert [sample for batch in batches[: len(batches) // 2] for sample in batch] == own


def test_a_sampler_of_another_number_of_processes_is_refused() -> None:
    with pytest.raises(InvalidSetup, match=r"divides the data over 4 process.*give num_replicas=1, or leave the"):
        seen(lambda: DataLoader(NUMBERS, 4, sampler=DistributedSampler(NUMBERS, 4, 0)))


class Foreign(Sampler[int]):
    """Draws from a generator that nobody stores."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(22).tolist())

    def __len__(self) -> int:
        return 22


class ByEpoch(Foreign):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(22, generator=seeded(self.epoch)).tolist())


class Stateful(DataLoader[Any]):
    """As torchdata's StatefulDataLoader: it resumes where its state was taken."""

    at = 0

    def __iter__(self) -> Any:
        batches = list(torch.arange(22.0).split(4))
        while self.at < len(batches):
            self.at += 1
            yield [batches[self.at - 1]]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.at = state["at"]


def test_an_order_that_cannot_be_read_again_is_refused_within_an_epoch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def make() -> Any:
        return DataLoader(NUMBERS, 4, sampler=Foreign())

    seen(make, tmp_path, die_after=3)
    assert "can resume from checkpoints at the end of an epoch alone" in caplog.text

    with pytest.raises(
        InvalidData, match=r"DataLoader with a Foreign, whose order.*set_epoch.*Loader\(order="
    ) as error:
        seen(make, tmp_path)
    assert "cannot resume at batch 3 of epoch 0" in str(error.value)


def test_an_order_that_cannot_be_read_again_resumes_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    def make() -> Any:
        return DataLoader(NUMBERS, 4, sampler=Foreign())

    seen(make, tmp_path, max_duration="1ep")

    assert sorted(seen(make, tmp_path, max_duration="2ep").samples) == list(range(22))


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(NUMBERS, 4, sampler=ByEpoch()),
        lambda: DataLoader(NUMBERS, batch_sampler=BatchSampler(ByEpoch(), 4, drop_last=False)),
        lambda: DataLoader(NUMBERS, batch_sampler=[[3, 1], [4], [1, 5, 9]]),
        lambda: Stateful(NUMBERS, 4),
        lambda: DataLoader(NUMBERS, batch_size=None),
    ],
)
def test_other_loaders_resume_by_set_epoch_or_by_their_state(make: Callable[[], Any], tmp_path: Path) -> None:
    whole = seen(make).batches

    assert resumed(make, tmp_path / "within an epoch", 4) == whole
    assert resumed(make, tmp_path / "at its end", len(whole) // 2) == whole


class Drawing(Callback):
    """Draws from the generator of the training process in each step."""

    def __init__(self) -> None:
        self.drawn: list[float] = []

    def on_step_end(self, fit: Fit, loss: Tensor) -> None:
        self.drawn.append(torch.rand(()).item())


def noisy(samples: list[Any]) -> Any:
    return [torch.stack([sample[0] for sample in samples]) + torch.rand(())]


class Unsized:
    """Batches whose number is known only at their end, so that one is read ahead."""

    def __iter__(self) -> Iterator[Any]:
        return iter(DataLoader(NUMBERS, 4, collate_fn=noisy))


@pytest.mark.parametrize("make", [lambda: DataLoader(NUMBERS, 4, sampler=ByEpoch(), collate_fn=noisy), Unsized])
def test_what_is_read_again_draws_nothing_from_the_training_process(make: Callable[[], Any], tmp_path: Path) -> None:
    def drawn(checkpoints: Checkpoints | None, *callbacks: Callback) -> list[float]:
        train, drawing = make(), Drawing()
        run = trainer(train=train, callbacks=[drawing, *callbacks], checkpoints=checkpoints, optimizer=SLOWLY)
        with suppress(KeyboardInterrupt):
            run.fit()
        return drawing.drawn

    policy = Checkpoints(folder=tmp_path, every="4st")
    assert drawn(policy, Seen(die_after=4)) + drawn(policy) == drawn(None)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Stateful(NUMBERS, 4),
        lambda: DataLoader(NUMBERS, batch_sampler=[[3, 1], [4], [1, 5, 9]], num_workers=1, persistent_workers=True),
    ],
)
def test_a_loader_that_serves_one_iterator_is_not_trained_and_evaluated_on(make: Callable[[], Any]) -> None:
    loader = make()

    with pytest.raises(InvalidSetup, match=r"set 'val' is the training data itself.*one iterator at a time"):
        seen(lambda: loader, evaluate=loader, evaluate_every="2st")


def test_another_order_than_that_of_the_checkpoint_is_found(tmp_path: Path) -> None:
    seen(lambda: Loader(NUMBERS, 4, order=lambda epoch, generator: torch.arange(22)), tmp_path, die_after=3)

    with pytest.raises(
        WrongCheckpoint, match=r"order='\w+' in the checkpoint.*An order or a sampler has to follow from the epoch"
    ):
        seen(lambda: Loader(NUMBERS, 4, order=lambda epoch, generator: torch.randperm(22)), tmp_path)


def opened(worker: int) -> None:
    info: Any = get_worker_info()
    info.dataset.offset = 100.0


class Offset(TensorDataset):
    offset = 0.0

    def __getitem__(self, index: int) -> Any:
        return (self.tensors[0][index] + self.offset,)


def test_the_workers_of_a_loader_start_as_it_says() -> None:
    def make() -> Any:
        return DataLoader(Offset(torch.arange(8.0)), 4, num_workers=1, worker_init_fn=opened)

    assert seen(make, max_duration="1ep").samples == [100 + each for each in range(8)]


def test_a_loader_of_another_class_that_iterates_in_its_own_way_is_read_as_it_is() -> None:
    class Doubled(DataLoader[Any]):
        def __iter__(self) -> Any:
            return ([2 * batch[0]] for batch in super().__iter__())

    assert not isinstance(feed(Doubled(NUMBERS, 4)), Loader)
    assert seen(lambda: Doubled(NUMBERS, 4), max_duration="1ep").samples == [2.0 * each for each in range(22)]
