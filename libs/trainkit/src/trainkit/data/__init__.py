"""Data whose order is a pure function of (seed, epoch, position), so that a run goes on exactly where it was."""

from trainkit.data.feed import Feed
from trainkit.data.loader import Loader

__all__ = ["Feed", "Loader"]
