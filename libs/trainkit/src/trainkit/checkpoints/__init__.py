"""Checkpoints that survive a kill at any moment, do not stall training, and need no pickle to be read."""

from trainkit.checkpoints.policy import Best, Checkpoints

__all__ = ["Best", "Checkpoints"]
