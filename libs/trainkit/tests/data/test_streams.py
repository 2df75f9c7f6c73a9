"""Streams: divided over processes and workers, ended together, and resumed within an epoch."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from trainkit.data import Loader
from trainkit.errors import InvalidData, InvalidSetup

from libs.trainkit.tests.data.seen import SLOWLY, resumed, seen
from libs.trainkit.tests.slope import Slope, trainer

COUNT = 22


class Numbers(IterableDataset[Tensor]):
    """Yields all of its numbers wherever it is iterated."""

    def __init__(self, count: int = COUNT) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(float(self.count)))


class Sized(Numbers):
    def __len__(self) -> int:
        return self.count


class Dividing(Numbers):
    """Divides itself over the workers that it is told of."""

    def __iter__(self) -> Iterator[Tensor]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info is not None else (0, 1)
        return iter(torch.arange(float(self.count))[first::step])


class Buffered(Numbers):
    """Shuffles by a buffer, from the generator that everything draws from. It has no state."""

    def __iter__(self) -> Iterator[Tensor]:
        held: list[Tensor] = []
        for number in torch.arange(float(self.count)):
            held.append(number)
            if len(held) > 5:
                yield held.pop(random.randrange(len(held)))
        random.shuffle(held)
        yield from held


class Stateful(Numbers):
    """Shuffles by a buffer and has a state. Not to be read again what was done, it fails when it starts twice."""

    def __init__(self, count: int = COUNT) -> None:
        super().__init__(count)
        self.at, self.held = 0, list[float]()

    def __iter__(self) -> Iterator[Tensor]:
        while self.at < self.count or self.held:
            while self.at < self.count and len(self.held) < 5:
                self.held.append(float(self.at))
                self.at += 1
            yield torch.tensor(self.held.pop(random.randrange(len(self.held))))
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "held": self.held}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.at, self.held = state["at"], state["held"]


class DividingStateful(Dividing):
    """Has a state for the share of each worker."""

    def __init__(self, count: int = COUNT) -> None:
        super().__init__(count)
        self.at = 0

    def __iter__(self) -> Iterator[Tensor]:
        share = list(super().__iter__())
        while self.at < len(share):
            self.at += 1
            yield share[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.at = state["at"]


class ByEpoch(Numbers):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Tensor]:
        return (number + 100 * self.epoch for number in super().__iter__())


class Batches(Numbers):
    """Yields batches."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(float(self.count)).split(3))


STREAMS: dict[str, Callable[[], Any]] = {
    "plain": Numbers,
    "sized": Sized,
    "dividing": Dividing,
    "buffered": Buffered,
    "stateful": Stateful,
    "dividing, stateful": DividingStateful,
}


def torchs(kind: str, workers: int = 0) -> Any:
    return DataLoader(STREAMS[kind](), batch_size=4, num_workers=workers)


def ours(kind: str, workers: int = 0) -> Any:
    return Loader(STREAMS[kind](), 4, num_workers=workers)


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("make", [torchs, ours])
def test_a_stream_gives_every_sample_once_and_resumes_within_an_epoch(make: Any, kind: str, tmp_path: Path) -> None:
    whole = seen(lambda: make(kind))

    assert sorted(whole.samples) == sorted([*range(COUNT)] * 2)
    assert resumed(lambda: make(kind), tmp_path, 4) == whole.batches


def test_a_loader_and_torchs_loader_read_a_stream_alike() -> None:
    for kind in ("plain", "buffered"):
        assert seen(lambda kind=kind: ours(kind)).batches == seen(lambda kind=kind: torchs(kind)).batches


def test_a_stream_is_told_its_epoch() -> None:
    assert seen(lambda: Loader(ByEpoch(3), 4)).samples == [0, 1, 2, 100, 101, 102]


def test_a_stream_of_batches_is_divided_by_batches() -> None:
    assert seen(lambda: DataLoader(Batches(8), batch_size=None), max_duration="1ep").batches == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 7],
    ]


def test_a_smaller_last_batch_can_be_left_out() -> None:
    assert len(seen(lambda: Loader(Numbers(), 4, drop_last=True)).samples) == 40
    assert len(seen(lambda: DataLoader(Numbers(), 4, drop_last=True)).samples) == 40


def test_reading_a_stream_draws_nothing_from_the_training_process() -> None:
    torch.manual_seed(1), random.seed(1)
    before = torch.get_rng_state(), random.getstate()

    list(Loader(Buffered(), 4))

    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def test_iterators_of_a_stream_are_independent() -> None:
    loader = Loader(DividingStateful(8), 4)

    assert [[one.tolist(), two.tolist()] for one, two in zip(loader, loader, strict=True)] == [
        [[0, 1, 2, 3]] * 2,
        [[4, 5, 6, 7]] * 2,
    ]


def divided(folder: str) -> None:
    rank, found, place = os.environ["RANK"], dict[str, Any](), Path(folder)
    for kind in STREAMS:
        for workers in (0, 2) if kind in ("buffered", "dividing, stateful") else (0,):
            name = f"{kind}, {workers}"

            def make(kind: str = kind, workers: int = workers) -> Any:
                return ours(kind, workers)

            whole = seen(make).batches
            found[name] = [whole, resumed(make, place / name, 2)]
    found["torch's, 2"] = [seen(lambda: torchs("dividing", 2)).batches, seen(lambda: torchs("plain")).batches]
    found["batches"] = seen(lambda: DataLoader(Batches(8), batch_size=None), max_duration="1ep").batches

    class Whole(Slope):
        def evaluation_step(self, batch: Tensor) -> Any:
            return {"loss": batch.mean()}

    sets = {kind: ours(kind) for kind in ("plain", "dividing")}
    fit = trainer(module=Whole(), train=ours("plain"), optimizer=SLOWLY, evaluate=sets, max_duration="1ep").fit()
    found["evaluated"] = dict(fit.results)
    (place / f"seen-{rank}").write_text(json.dumps(found))


def test_two_processes_and_their_workers_divide_a_stream_and_resume_within_it(tmp_path: Path, forks: Any) -> None:
    forks.succeed(divided, tmp_path, processes=2)

    one, other = (json.loads((tmp_path / f"seen-{rank}").read_text()) for rank in range(2))
    for name in (name for name in one if ", " in name and "torch" not in name):
        (whole, resumed_), (whole_, resumed_other) = one[name], other[name]
        assert (resumed_, resumed_other) == (whole, whole_), name
        assert len(whole) == len(whole_), name
        samples = [sample for batches in (whole, whole_) for batch in batches for sample in batch]
        assert sorted(samples) == sorted([*range(COUNT)] * 2), name
    assert one["plain, 0"][0][:2] + other["plain, 0"][0][:2] == [[0, 1], [4, 5], [2, 3], [6, 7]]
    assert one["dividing, 0"][0][0] == [0, 2]
    for at in range(2):
        samples = [each for batches in (one, other) for batch in batches["torch's, 2"][at] for each in batch]
        assert sorted(samples) == sorted([*range(COUNT)] * 2)
    assert one["batches"] + other["batches"] == [[0, 1, 2], [], [3, 4, 5], [6, 7]]
    assert one["evaluated"] == other["evaluated"]
    for kind in ("plain", "dividing"):
        assert one["evaluated"][f"{kind}/loss"] == pytest.approx(sum(range(COUNT)) / COUNT)


def rest(folder: str) -> None:
    place = Path(folder)
    run = seen(lambda: Loader(Stateful(), 4, num_workers=2), place / "checkpoints", max_duration="1ep")
    (place / f"seen-{os.environ['RANK']}").write_text(json.dumps(run.samples))


def test_another_number_of_processes_and_workers_reads_the_rest_of_the_same_stream(tmp_path: Path, forks: Any) -> None:
    whole = seen(lambda: Loader(Stateful(), 4), max_duration="1ep").samples

    before = seen(lambda: Loader(Stateful(), 4), tmp_path / "checkpoints", 2, max_duration="1ep").samples
    forks.succeed(rest, tmp_path, processes=2)

    read = [each for rank in range(2) for each in json.loads((tmp_path / f"seen-{rank}").read_text())]
    assert before == whole[:8]
    assert sorted(read) == sorted(whole[8:])


class Ranked(Numbers):
    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self._rank, self._world = rank, world_size

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(float(COUNT))[self._rank :: self._world])


class Asking(Numbers):
    def __iter__(self) -> Iterator[Tensor]:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        return iter(torch.arange(float(COUNT))[rank::2])


def ranked(folder: str) -> None:
    rank, found = int(os.environ["RANK"]), dict[str, Any]()
    for name, dataset in (("held", Ranked(rank, 2)), ("asked", Asking())):
        try:
            seen(lambda dataset=dataset: Loader(dataset, 4))
        except InvalidSetup as error:
            found[name] = str(error)
    found["dataset"] = seen(lambda: Loader(Ranked(rank, 2), 4, divided_by="dataset"), max_duration="1ep").samples
    found["loader"] = seen(lambda: Loader(Dividing(), 4, divided_by="loader"), max_duration="1ep").samples
    (Path(folder) / f"seen-{rank}").write_text(json.dumps(found))


def test_a_stream_that_divides_itself_by_rank_is_divided_once(tmp_path: Path, forks: Any) -> None:
    forks.succeed(ranked, tmp_path, processes=2)

    one, other = (json.loads((tmp_path / f"seen-{rank}").read_text()) for rank in range(2))
    assert "the Ranked seems to divide itself over the processes, because it uses '_rank'" in one["held"]
    assert "because it uses 'get_rank'" in one["asked"]
    assert "divided_by='dataset'" in one["asked"]
    assert one["dataset"] == [*range(0, COUNT, 2)]
    for way in ("dataset", "loader"):
        assert sorted(one[way] + other[way]) == [*range(COUNT)]


def test_a_dataset_that_divides_itself_resumes_on_as_many_workers_alone(tmp_path: Path) -> None:
    seen(lambda: ours("dividing", 2), tmp_path, die_after=3)

    with pytest.raises(
        InvalidData, match=r"did so over 1 process\(es\) of 2 worker\(s\), of which there are now 1 of 1"
    ):
        seen(lambda: ours("dividing", 0), tmp_path)


class Seeded(Numbers):
    """Shuffles by the seed of its worker."""

    def __iter__(self) -> Iterator[Tensor]:
        info = get_worker_info()
        order = list(range(self.count))
        random.Random(0 if info is None else info.seed).shuffle(order)
        return iter(torch.tensor(order, dtype=torch.float32))


def by_number(worker: int) -> None:
    random.seed(worker)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Loader(Seeded(), 4, num_workers=2),
        lambda: DataLoader(Buffered(), 4, num_workers=2, worker_init_fn=by_number),
    ],
    ids=["the seed of its worker", "a worker_init_fn"],
)
def test_workers_read_the_same_order_of_a_stream_that_the_loader_divides(make: Callable[[], Any]) -> None:
    assert sorted(seen(make, max_duration="1ep").samples) == list(range(COUNT))


class OneEach(Numbers):
    """Each worker has a shard of its own."""

    def __iter__(self) -> Iterator[Tensor]:
        info = get_worker_info()
        return iter(torch.arange(float(self.count)) + (0 if info is None else 100 * info.id))


class Late(Numbers):
    """Looks who divides it after its first sample."""

    def __iter__(self) -> Iterator[Tensor]:
        yield torch.tensor(0.0)
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info is not None else (0, 1)
        yield from torch.arange(float(self.count))[1 + first :: step]


@pytest.mark.parametrize(
    ("make", "what"),
    [(OneEach, "id and not num_workers"), (Late, "num_workers after its first sample")],
    ids=["its number alone", "too late"],
)
def test_a_stream_that_may_divide_itself_is_refused(make: Any, what: str) -> None:
    with pytest.raises(InvalidData, match=rf"read get_worker_info\(\)\.{what}, so it is not clear whether each worker"):
        seen(lambda: Loader(make(), 4, num_workers=2), max_duration="1ep")

    assert len(seen(lambda: Loader(make(), 4, num_workers=1), max_duration="1ep").samples) == COUNT


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Loader(Numbers(), 4, shuffle=True),
            "is the stream Numbers, which has its own order: leave out shuffle",
        ),
        (lambda: Loader((n for n in range(3)), 4), "is a generator, which can be iterated once"),
        (lambda: Loader([1, 2], 4, divided_by="loader"), "divided_by='loader' is of streams"),
        (lambda: Loader(Numbers(), 4).length(0), "has no samples by number"),
        (lambda: Loader(Numbers(), 4, divided_by="me"), "divided_by='me': give 'loader', 'dataset' or None"),
    ],
)
def test_what_a_stream_cannot_do_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(InvalidSetup, match=message):
        make()
