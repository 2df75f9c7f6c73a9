"""Modules that are larger than a process: initialised and read by parts, with the values of one process."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from trainkit import Checkpoints, Trainer, Weights
from trainkit.errors import DamagedCheckpoint, InvalidSetup
from trainkit.initial.deferred import Recording
from trainkit.loop.fit import Fit
from trainkit.sharded import is_sharded
from trainkit.strategies import FSDP, DeepSpeed

WIDTH, WORDS = 128, 200  # large enough for parameters to be deferred


class Positions(nn.Module):
    """A table that no checkpoint has, computed in the constructor."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.outer(torch.arange(20.0), 10 ** -torch.arange(WIDTH / 2)), persistent=False)

    def reset_parameters(self) -> None:
        self.table.copy_(torch.outer(torch.arange(20.0), 10 ** -torch.arange(WIDTH / 2)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.out(self.attention(x, x, x, need_weights=False)[0] + self.norm(x)))


class Model(nn.Module):
    """Initialises itself as such models do: by `apply`, by name, with numbers read from a tensor; its head is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, WIDTH, padding_idx=0), Positions()
        self.start = nn.Parameter(0.02 * torch.randn(WORDS, WIDTH))
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.rates = [float(rate) for rate in torch.linspace(0, 0.1, 2)]
        self.apply(self._initialise)
        for name, parameter in self.named_parameters():
            if name.endswith("out.weight"):
                nn.init.trunc_normal_(parameter, std=0.02 / math.sqrt(2))
        self.head.weight = self.words.weight

    def _initialise(self, part: nn.Module) -> None:
        if isinstance(part, nn.Embedding):
            nn.init.normal_(part.weight, std=0.02)

    def training_step(self, batch: Tensor) -> Tensor:
        x = self.words(batch) + self.start[batch]
        x = x + torch.cat([self.positions.table, self.positions.table], 1)[: batch.shape[1]]
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


class Plain(nn.Module):
    """Every submodule initialises itself by `reset_parameters`."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, WIDTH), Positions()
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(2)])
        self.head = nn.Linear(WIDTH, WORDS)

    def training_step(self, batch: Tensor) -> Tensor:
        x = self.blocks(self.words(batch) + self.positions.table.repeat(1, 2)[: batch.shape[1]])
        return nn.functional.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def on_meta(kind: type[nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return kind()


class Wide(nn.Module):
    """A model whose layers are all of one size."""

    LAYERS, LAYER_BYTES = 10, 256 * 256 * 4

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(256, 256, bias=False) for _ in range(self.LAYERS)])

    def training_step(self, batch: Tensor) -> Tensor:
        return sum((layer.weight.sum() for layer in self.layers), torch.zeros(()))


def batches() -> list[Tensor]:
    return list(torch.randint(1, WORDS, (2, 4, 12), generator=torch.Generator().manual_seed(1)))


def trained(module: Any, **options: Any) -> Fit:
    settings: dict[str, Any] = {
        "optimizer": partial(torch.optim.AdamW, lr=0.0),
        "train": batches(),
        "max_duration": "1ep",
        "log_every": None,
        "seed": 5,
        **options,
    }
    return Trainer(module=module, **settings).fit()


def values(fit: Fit) -> dict[str, Tensor]:
    """All tensors of the module, whole."""
    held = fit.strategy.weights() | dict(fit.module.named_buffers())
    return {name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for name, tensor in held.items()}


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


def seeded(kind: type[nn.Module]) -> dict[str, Tensor]:
    """The tensors of a module that is made as usual."""
    torch.manual_seed(5)
    made = kind()
    return made.state_dict() | dict(made.named_buffers())


class Held(TorchDispatchMode):
    """The most bytes that new tensors held at once. Shards within a DTensor do not come by here."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        views = [each.alias_info for each in func._schema.returns]  # of a mapped file, for instance
        for each in tree_flatten(result)[0] if not any(views) else ():
            if isinstance(each, Tensor) and type(each) is Tensor and each.device.type == "cpu":
                storage = each.untyped_storage()
                self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._alive = {at: pair for at, pair in self._alive.items() if not pair[0].expired()}
        self.most = max(self.most, sum(size for _, size in self._alive.values()))
        return result


class Made(Exception):
    """The module has its initial values."""


def held(**options: Any) -> float:
    """The most that new tensors held at once until the optimizer is made, in layers of `Wide`."""

    def optimizer(named: Any) -> Any:
        raise Made

    with Held() as seen, pytest.raises(Made):
        trained(optimizer=optimizer, **options)
    return seen.most / Wide.LAYER_BYTES


class Tied(Plain):
    """A layer of the first unit is also one of the second."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1][0].weight = self.blocks[0][0].weight


def sharding(folder: str) -> None:
    """Every way to give a module starts with the values of one process."""
    for kind, given in ((Model, Model), (Plain, on_meta(Plain)), (Tied, Tied), (Tied, on_meta(Tied))):
        for strategy in (FSDP(units=[Block, nn.LayerNorm]), "fsdp"):
            fit = trained(given, strategy=strategy)
            assert_same(values(fit), seeded(kind))
            given = given if isinstance(given, type) else on_meta(kind)
        if kind is Tied:
            assert fit.module.blocks[1][0].weight is fit.module.blocks[0][0].weight
    torch.manual_seed(5)
    assert_same(values(trained(Model(), strategy="fsdp")), seeded(Model))
    assert_same(values(trained(Model, strategy="ddp")), seeded(Model))
    assert_same(values(trained(on_meta(Plain), strategy="ddp")), seeded(Plain))

    assert held(module=Wide, strategy="ddp") > Wide.LAYERS
    assert held(module=Wide, strategy="fsdp") < 2
    assert held(module=on_meta(Wide), strategy="fsdp") < 2
    assert held(module=Wide, strategy="fsdp", weights=f"{folder}/wide.safetensors") < 1


def zero(folder: str) -> None:
    """The same on stage 3 of DeepSpeed, whose engine starts with what is there when the optimizer is made."""

    def partitioned(given: Any, **options: Any) -> dict[str, Tensor]:
        place = DeepSpeed(stage=3)
        with pytest.raises(Made):
            trained(given, strategy=place, optimizer=optimizer, **options)
        return place.weights() | dict(place.module.named_buffers())

    def optimizer(named: list[tuple[str, nn.Parameter]]) -> Any:
        shapes.update({name: p.shape for name, p in named})
        raise Made

    shapes: dict[str, torch.Size] = {}
    assert_same(partitioned(Model), seeded(Model))
    assert_same(partitioned(on_meta(Tied)), seeded(Tied))
    torch.manual_seed(5)
    assert_same(partitioned(Model()), seeded(Model))
    stored = Path(folder, "plain.safetensors")
    shapes.clear()
    assert_same(partitioned(Plain, weights=stored), {**read(stored), **dict(Plain().named_buffers())})
    assert shapes == {name: p.shape for name, p in Plain().named_parameters()}  # optimizers are grouped by them
    assert held(module=Wide, strategy=DeepSpeed(stage=3)) < 2 + Wide.LAYERS / 2


def read(path: Path) -> dict[str, Tensor]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def write(path: Path, kind: type[nn.Module]) -> dict[str, Tensor]:
    """Weights of a module that was made with another seed, without the second name of what is tied."""
    torch.manual_seed(6)
    weights = {name: p.detach().clone() for name, p in kind().named_parameters()}
    save_file(weights, path)
    return weights


def test_sharded_modules_start_with_the_bits_of_one_process(tmp_path: Path, forks: Any) -> None:
    write(tmp_path / "wide.safetensors", Wide)
    write(tmp_path / "plain.safetensors", Plain)

    forks.succeed(sharding, tmp_path, processes=2)
    forks.succeed(zero, tmp_path, processes=2)

    assert_same(values(trained(Model)), seeded(Model))
    assert_same(values(trained(on_meta(Plain))), seeded(Plain))


def test_a_constructor_may_do_anything_to_a_large_tensor() -> None:
    def made(kind: Callable[[], Any]) -> tuple[Any, Tensor]:
        torch.manual_seed(5)
        return kind(), torch.rand(1)

    for kind in (Anything, encoder):
        expected, next_number = made(kind)
        with (recording := Recording()):
            module, number = made(kind)
        recording.finish(module)
        assert torch.equal(number, next_number)
        for name, tensor in module.state_dict().items():
            value = recording.values([tensor])[0] if tensor.is_meta else tensor
            assert torch.equal(value, expected.state_dict()[name]), name
            assert value.stride() == expected.state_dict()[name].stride()
        assert sum(p.is_meta for p in module.parameters()) > 5


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, batch_first=True), 2)


class Anything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        normalised, spectral = nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(5)])
        self.more = nn.ModuleList([normalised(nn.Linear(WIDTH, WIDTH)), spectral(nn.Linear(WIDTH, WIDTH))])
        self.images = nn.Conv2d(64, 64, 3).to(memory_format=torch.channels_last)
        self.own = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(4)))
        self.half = nn.Linear(WIDTH, WIDTH).to(torch.bfloat16)
        self.register_buffer("mask", torch.tril(torch.ones(WIDTH, WIDTH)))
        first, second, third, fourth, fifth = self.layers
        nn.init.orthogonal_(first.weight)
        nn.init.sparse_(second.weight, 0.1)
        nn.init.trunc_normal_(third.weight)
        with torch.no_grad():
            fourth.weight.data = torch.rand(WIDTH, WIDTH)
            fourth.weight[::2].mul_(first.weight.std().item())
            fifth.weight.copy_(first.weight.t())
            first.weight.normal_()
            if fifth.weight.sum() > 1e9:
                fifth.weight.zero_()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("Bare", r"table is on the meta device, and Bare has no reset_parameters\(\) .* module=Net"),
        ("Forgetful", r"reset_parameters\(\) of Forgetful does not give table its values"),
        ("Reaching", r"reset_parameters\(\) of Reaching also uses tensors of other submodules"),
    ],
)
def test_a_module_on_meta_that_cannot_be_initialised_is_refused(kind: str, message: str) -> None:
    with pytest.raises(InvalidSetup, match=message):
        trained(on_meta(globals()[kind]))


class Bare(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(3))


class Forgetful(Bare):
    def reset_parameters(self) -> None:
        pass


class Reaching(Bare):
    def reset_parameters(self) -> None:
        nn.init.zeros_(self.table)
        nn.init.zeros_(self.head.weight)


def reading(folder: str) -> None:
    """Weights from files, in each of their forms, and a resumed run."""
    tied, whole = read(Path(folder, "tied.safetensors")), read(Path(folder, "plain.safetensors"))
    for strategy in ("fsdp", "ddp"):
        fit = trained(Model, strategy=strategy, weights=f"{folder}/tied.safetensors")
        assert_same({name: each for name, each in values(fit).items() if name in tied}, tied)
        assert fit.module.head.weight is fit.module.words.weight
    expected = {**whole, **dict(Plain().named_buffers())}
    for given in (Plain, on_meta(Plain), Plain()):
        assert_same(values(trained(given, strategy="fsdp", weights=f"{folder}/several")), expected)

    partly = Weights(f"{folder}/headless.safetensors", missing=["head.*"], unexpected=["old.*"], prefix="")
    heads = {name: each for name, each in seeded(Plain).items() if name.startswith("head.")}
    assert_same(values(trained(Plain, strategy="fsdp", weights=partly)), {**expected, **heads})

    options: dict[str, Any] = {"strategy": "fsdp", "optimizer": partial(torch.optim.AdamW, lr=0.01)}
    checkpoints = Checkpoints(folder=Path(folder, "run"), every="1st")
    trained(Plain, checkpoints=checkpoints, max_duration="1st", **options)
    resumed = trained(Plain, checkpoints=checkpoints, **options)
    assert resumed.resumed_step == 1
    straight = values(trained(Plain, **options))
    assert_same(values(resumed), straight)
    again = trained(on_meta(Plain), strategy="fsdp", weights=Path(folder, "run", "step-2"))
    assert_same(values(again), straight)
    states = resumed.optimizer.state.values()
    assert all(is_sharded(state["exp_avg"]) for state in states)


def test_weights_are_read_into_shards(tmp_path: Path, forks: Any) -> None:
    write(tmp_path / "tied.safetensors", Model)
    weights = write(tmp_path / "plain.safetensors", Plain)
    headless = {name: each for name, each in weights.items() if not name.startswith("head.")}
    save_file({**headless, "old.weight": torch.zeros(1)}, tmp_path / "headless.safetensors")
    (tmp_path / "several").mkdir()
    files = {name: f"model-0000{1 + at % 2}-of-00002.safetensors" for at, name in enumerate(weights)}
    for file in set(files.values()):
        save_file({name: weights[name] for name in weights if files[name] == file}, tmp_path / "several" / file)
    (tmp_path / "several" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))

    forks.succeed(reading, tmp_path, processes=2)


def test_weights_that_do_not_fit_are_refused_with_a_way_out(tmp_path: Path) -> None:
    weights = write(tmp_path / "plain.safetensors", Plain)

    def refused(change: dict[str, Tensor | None], message: str, error: type[Exception] = InvalidSetup) -> None:
        changed = {name: each for name, each in {**weights, **change}.items() if each is not None}
        save_file(changed, tmp_path / "changed.safetensors")
        with pytest.raises(error, match=message):
            trained(Plain, weights=tmp_path / "changed.safetensors")

    refused({"head.bias": None}, r"has no head.bias of Plain.*prefix=.*missing=\[")
    refused(
        {"haed.bias": torch.zeros(1)}, r"has haed.bias, and the module does not \(did you mean head.bias\?\).*unexp"
    )
    refused({"head.bias": torch.zeros(7)}, r"head.bias has shape \(7,\), and head.bias of the module \(200,\)")
    with pytest.raises(InvalidSetup, match="is not there: give a safetensors file, a folder"):
        trained(Plain, weights=tmp_path / "nothing")
    (tmp_path / "torn.safetensors").write_bytes((tmp_path / "plain.safetensors").read_bytes()[:-9])
    with pytest.raises(DamagedCheckpoint, match=r"torn\.safetensors cannot be read"):
        trained(Plain, weights=tmp_path / "torn.safetensors")
    with pytest.raises(InvalidSetup, match="weights is a int: give the path"):
        trained(Plain, weights=5)
