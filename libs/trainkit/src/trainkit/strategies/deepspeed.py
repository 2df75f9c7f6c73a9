"""DeepSpeed's ZeRO: optimizer state (1), gradients (2) and parameters (3) are cut over the processes as flat pieces.

DeepSpeed reduces gradients and updates the pieces. The rest stays trainkit's own: weights are kept in 32 bits and bf16
comes from autocast, windows are the loop's, clipping works on the pieces where they lie, and checkpoints are written by
trainkit's checkpointer.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.errors import InvalidSetup, InvalidStep
from trainkit.extras import require
from trainkit.initial.traversal import children_first
from trainkit.precision import Precision
from trainkit.strategies.base import TrainingStep
from trainkit.strategies.ddp import Distributed

if TYPE_CHECKING:
    from trainkit.trainer import OptimizerFactory

# They look at every element alone, so it does not matter where a parameter was cut. Adagrad does too, but DeepSpeed
# replaces the object, and with it the groups that a schedule changes.
_ELEMENTWISE = ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adadelta", "ASGD", "Rprop")
_NEVER = 2**62


class DeepSpeed(Distributed):
    """ZeRO by DeepSpeed's engine, from the package's extra `deepspeed`.

    Args:
        stage: what is cut over the processes: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters.
        bucket_mb: gradients are sent in pieces of this size.
        persist_below: stage 3 keeps parameters of fewer elements whole, because gathering them takes longer.
        quiet: DeepSpeed tells of warnings and errors alone, and not of what it prepares.

    Raises:
        InvalidSetup: there is no such stage.
    """

    name: ClassVar[str] = "deepspeed"
    stores_window: ClassVar[bool] = False
    works_alone = False

    def __init__(
        self,
        *,
        stage: Literal[0, 1, 2, 3] = 2,
        bucket_mb: float = 200,
        persist_below: int = 100_000,
        quiet: bool = True,
    ) -> None:
        if stage not in (0, 1, 2, 3):
            raise InvalidSetup(f"DeepSpeed(stage={stage!r}): choose 0, 1, 2 or 3")
        self.stage, self._bucket_mb, self._persist_below, self._quiet = stage, bucket_mb, persist_below, quiet
        self.holds_gradients = stage == 0
        self.holds_weights = stage < 3
        self.shards_parameters = stage == 3
        self.updates_copies = stage in (1, 2)  # those of stage 3 are not there between steps
        self._engine: Any = None

    def open(self, device: torch.device | str | None) -> None:
        super().open(device)
        if self.device.type == "cpu":  # DeepSpeed decides when it is imported
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        os.environ.setdefault("LOCAL_RANK", str(self.local_rank))  # DeepSpeed insists, whoever started the process
        self._deepspeed: Any = require("deepspeed", "the strategy 'deepspeed'")
        # Only inference uses it, and it would be compiled at the first start, for minutes.
        require("deepspeed.ops", "the strategy 'deepspeed'").__compatible_ops__["deepspeed_shm_comm"] = False
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING if self._quiet else logging.INFO)

    def prepare(self, module: nn.Module, precision: Precision) -> None:
        self._check(module, precision)
        self.precision = precision
        self.module = self._partitioned(module) if self.stage == 3 else self.placed(module)
        self._step = TrainingStep(self.module, precision)
        self.forward, self.evaluate = self._forward, self._evaluate

    def _partitioned(self, module: nn.Module) -> nn.Module:
        """The module with its initial values, of which every process keeps its part, one submodule after the other."""
        config = self._config(module)

        def partition(owner: nn.Module) -> None:
            owner._apply(lambda tensor: tensor.to(self.device), recurse=False)
            self._deepspeed.zero.Init(module=owner, config_dict_or_path=config, dtype=torch.float32)

        if self.initial is not None:
            self.initial.fill(module, self.device, then=partition)
        else:
            for _, owner in children_first(module):
                partition(owner)
        return module

    def _check(self, module: nn.Module, precision: Precision) -> None:
        if precision.scaler is not None:
            raise InvalidSetup("precision='fp16' with strategy='deepspeed': use 'bf16', or strategy='fsdp'")
        for name, p in module.named_parameters():
            if p.dtype != torch.float32:
                raise InvalidSetup(
                    f"{name} is {str(p.dtype).removeprefix('torch.')}, and strategy='deepspeed' keeps weights in 32 "
                    "bits: convert the module with .float(), and choose precision='bf16' to compute in 16 bits"
                )
        if self.stage < 3:
            return
        for part in module.modules():
            if hasattr(part, "_recomputed") or part._compiled_call_impl is not None:
                wrong = "recompute" if hasattr(part, "_recomputed") else "compile"
                raise InvalidSetup(f"{wrong} does not go with stage 3 of deepspeed: use stage 2, or strategy='fsdp'")

    def make_optimizer(self, factory: OptimizerFactory) -> Optimizer:
        with self._whole_shapes():
            optimizer = super().make_optimizer(factory)
        kind = type(optimizer)
        names = {id(p): name for name, p in self.module.named_parameters()}
        if self.stage:  # DeepSpeed replaces the groups' parameters by its pieces
            self.group_names = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        if self.stage and kind not in [getattr(torch.optim, name) for name in _ELEMENTWISE]:
            raise InvalidSetup(
                f"stage {self.stage} of deepspeed cuts parameters anywhere, which {kind.__name__} may not bear: "
                f"use {', '.join(_ELEMENTWISE)} of torch.optim, stage 0, or strategy='fsdp'"
            )
        self._engine, *_ = self._deepspeed.initialize(
            model=self._step, optimizer=optimizer, config=self._config(self.module)
        )
        self._engine.set_gradient_accumulation_boundary(True)
        return optimizer

    @contextmanager
    def _whole_shapes(self) -> Iterator[None]:
        """Within it, the parameters of stage 3 have the shapes by which optimizers are grouped, and no memory."""
        parts = {p: p.data for p in self.module.parameters() if hasattr(p, "ds_id")}
        for p, part in parts.items():
            p.data = part.new_empty(1).expand(p.ds_shape)  # type: ignore[attr-defined]
        try:
            yield
        finally:
            for p, part in parts.items():
                p.data = part

    def _config(self, module: nn.Module) -> dict[str, Any]:
        trained = sum(getattr(p, "ds_numel", p.numel()) for p in module.parameters() if p.requires_grad)
        bucket = max(1, min(trained, int(self._bucket_mb * 2**20 / 4)))
        parts = 2 * self.world_size  # DeepSpeed cuts it into equal parts of an even size
        bucket = -(-bucket // parts) * parts
        return {
            "train_micro_batch_size_per_gpu": 1,  # asked for, and only reported
            "steps_per_print": _NEVER,
            "gradient_clipping": 0.0,  # ours is `clip`; without this, DeepSpeed clips every gradient at 1
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {
                "stage": self.stage,
                "reduce_bucket_size": bucket,
                "allgather_bucket_size": bucket,
                "stage3_prefetch_bucket_size": bucket,
                "stage3_param_persistence_threshold": self._persist_below,
                "memory_efficient_linear": False,  # it would replace torch's linear for the whole process
            },
        }

    def _forward(self, batch: Any) -> Any:
        return self._engine(batch)

    def _evaluate(self, batch: Any) -> Any:
        return self._engine(batch, evaluate=True)

    # Gradients and updates

    def accumulating(self) -> AbstractContextManager[Any]:
        return self._unfinished()

    @contextmanager
    def _unfinished(self) -> Iterator[None]:
        self._engine.set_gradient_accumulation_boundary(False)
        try:
            yield
        finally:
            self._engine.set_gradient_accumulation_boundary(True)

    def alone(self, batch: Any) -> Any:
        raise InvalidSetup(
            "out_of_memory='retry' and 'split' need steps that run without the other processes: with deepspeed "
            "use 'raise'"
        )

    def backward(self, loss: Tensor, **options: Any) -> None:
        self._engine.backward(loss, **options)

    def step(self, optimizer: Optimizer) -> bool:
        self._engine.step()
        return bool(self._engine.was_step_applied())

    def clear(self, optimizer: Optimizer, set_to_none: bool = True) -> None:
        zero = self._engine.optimizer
        zero.zero_grad()
        if self.stage:
            zero.averaged_gradients.clear()  # left over when an update was not made
        if self.stage == 3:
            zero.grad_partitions_flat_buffer.zero_()  # what a window does not write to would count once more
        elif self.stage:
            zero.all_grad_tensors.clear()

    def gradients(self) -> list[Tensor]:
        if not self.stage:
            return super().gradients()
        groups = self._engine.optimizer.averaged_gradients.values()
        return [piece for pieces in groups for piece in pieces or ()]

    def clip(self, max_norm: float | None) -> Tensor:
        if not self.stage:
            return super().clip(max_norm)
        pieces = self.gradients()
        norm = self.sum(torch.nn.utils.get_total_norm(pieces).to(self.device).square()).sqrt()
        if max_norm is not None and pieces:
            torch._foreach_mul_(pieces, (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    # Weights and state

    def settle(self) -> None:
        for buffer in self.module.buffers():
            torch.distributed.broadcast(buffer, 0)

    def weights(self) -> dict[str, Tensor]:
        """Parameters and stored buffers by name. Stage 3 gathers copies of them on the host, so all have to ask."""
        if self.stage < 3:
            return super().weights()
        values = {
            name: value for name, value in self.module.state_dict(keep_vars=True).items() if isinstance(value, Tensor)
        }
        wholes: dict[int, Tensor] = {}  # a tied parameter has two names and one copy
        for value in values.values():
            if id(value) not in wholes:
                wholes[id(value)] = self._gathered(value)
        return {name: wholes[id(value)] for name, value in values.items()}

    def _gathered(self, value: Tensor) -> Tensor:
        if not hasattr(value, "ds_id"):
            return value.detach()
        with self._deepspeed.zero.GatheredParameters([value]):
            return value.detach().cpu().clone()

    def put_weights(self, weights: Mapping[str, Tensor], extra: Mapping[str, Any]) -> None:
        values = self.module.state_dict(keep_vars=True)
        cut = {name for name in weights if hasattr(values[name], "ds_id")}  # of stage 3
        for name in cut:
            with self._deepspeed.zero.GatheredParameters([values[name]], modifier_rank=0):
                values[name].data.copy_(weights[name])
        self._load_copies({name: weight for name, weight in weights.items() if name not in cut}, extra)
        self.weights_changed()

    @contextmanager
    def writing_weights(self) -> Iterator[dict[str, nn.Parameter]]:
        """As for every strategy; stage 3 gathers all parameters, and what the first process writes counts."""
        if self.stage < 3:
            with super().writing_weights() as parameters:
                yield parameters
            return
        parameters = dict(self.module.named_parameters())
        try:
            with self._deepspeed.zero.GatheredParameters(list(parameters.values()), modifier_rank=0), torch.no_grad():
                yield parameters
        finally:
            self.weights_changed()

    def trained_changed(self) -> None:
        raise InvalidSetup(
            "parameters were frozen or unfrozen during the run, and strategy='deepspeed' trains those that it began "
            "with: do it before fit, or use strategy='ddp' or 'fsdp'"
        )

    def weights_changed(self) -> None:
        if not self.stage:
            return
        zero = self._engine.optimizer
        if self.stage < 3:
            self._refuse_replaced(zero)
        zero.refresh_fp32_params()  # an update is made to these copies, and then written into the module

    def _refuse_replaced(self, zero: Any) -> None:
        memory = {flat.untyped_storage().data_ptr() for flat in zero.bit16_groups_flat}
        for name, p in self.module.named_parameters():
            if p.requires_grad and p.numel() and p.untyped_storage().data_ptr() not in memory:
                raise InvalidStep(
                    f"{name} was given other memory, which DeepSpeed does not know of: write parameters in place, for "
                    "instance with copy_, and not with .data = ..."
                )

    def state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        pieces = [dict(optimizer.state.get(piece, {})) for piece in self._pieces()]
        return {"pieces": pieces, "layout": self.layout()}

    def load_state_dict(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        on_device = optimizer.defaults.get("capturable") or optimizer.defaults.get("fused")
        for piece, values in zip(self._pieces(), state.get("pieces", ()), strict=True):
            optimizer.state[piece] = {
                key: value.to(piece.device) if isinstance(value, Tensor) and (value.ndim or on_device) else value
                for key, value in values.items()
            }

    def accepts(self, state: Mapping[str, Any]) -> bool:
        if "layout" in state:
            return bool(state["layout"] == self.layout())
        return len(state.get("pieces", ())) == len(self._pieces())  # of a trainkit that stored no layout

    def layout(self) -> list[dict[str, Any]]:
        names = {id(p): name for name, p in self.module.named_parameters()}
        if not self.stage:
            return []
        zero, found = self._engine.optimizer, list[dict[str, Any]]()
        for at, piece in enumerate(self._pieces()):
            parts = self._parts_of_shards(zero, at) if self.stage == 3 else self._parts_of_slice(zero, at)
            found.append(
                {"size": piece.numel(), "parts": [[names[id(p)], *place] for p, *place in parts if place[2] > 0]}
            )
        return found

    def _parts_of_slice(self, zero: Any, group: int) -> Iterator[tuple[Any, int, int, int]]:
        """Stages 1 and 2 cut the parameters of a group, one after the other, into equal slices."""
        size = int(zero.partition_size[group])
        begin = self.rank * size
        for p, offset in zip(zero.round_robin_bit16_groups[group], zero.round_robin_bit16_offsets[group], strict=True):
            first, end = max(offset, begin), min(offset + p.numel(), begin + size)
            yield p, first - offset, first - begin, end - first

    def _parts_of_shards(self, zero: Any, group: int) -> Iterator[tuple[Any, int, int, int]]:
        """Stage 3 cuts each parameter into equal shards."""
        start = 0
        for p, shard in zip(zero.fp16_groups[group], zero.fp16_partitioned_groups[group], strict=True):
            first = self.rank * shard.ds_numel
            yield p, first, start, min(shard.ds_numel, p.ds_numel - first)
            start += shard.ds_numel

    def _pieces(self) -> list[Tensor]:
        """What the optimizer updates on this process."""
        if not self.stage:
            return []
        zero = self._engine.optimizer
        return list(zero.fp32_partitioned_groups_flat if self.stage == 3 else zero.single_partition_of_fp32_groups)

    def describe(self) -> Mapping[str, Any]:
        return {**super().describe(), "stage": self.stage}
