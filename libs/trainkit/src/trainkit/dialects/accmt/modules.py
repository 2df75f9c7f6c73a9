"""The base classes of modules."""

from trainkit.dialects.accmt.extended import ExtendedAcceleratorModule
from trainkit.dialects.accmt.module import AcceleratorModule

__all__ = ["AcceleratorModule", "ExtendedAcceleratorModule"]
