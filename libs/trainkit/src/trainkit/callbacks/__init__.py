"""What is called around everything that the loop does."""

from trainkit.callbacks.base import HOOKS, Callback

__all__ = ["HOOKS", "Callback"]
