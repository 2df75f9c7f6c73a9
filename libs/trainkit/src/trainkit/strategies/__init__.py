"""Where tensors live and how gradients meet: single, DDP, FSDP2, DeepSpeed."""

from trainkit.strategies.base import Strategy
from trainkit.strategies.ddp import DDP
from trainkit.strategies.deepspeed import DeepSpeed
from trainkit.strategies.fsdp import FSDP
from trainkit.strategies.named import strategy
from trainkit.strategies.single import Single

__all__ = ["DDP", "FSDP", "DeepSpeed", "Single", "Strategy", "strategy"]
