"""Parts of trainkit that stand on an optional package, and what to install when it is missing."""

from __future__ import annotations

import importlib
from types import ModuleType

_EXTRAS = {
    "deepspeed": "deepspeed",
    "mlflow": "mlflow",
    "optuna": "search",
    "tensorboard": "tensorboard",
    "trainyard": "yard",
    "transformers": "huggingface",
}


class MissingExtra(ImportError):
    """A package that only part of trainkit needs is not installed."""


def require(module: str, purpose: str) -> ModuleType:
    """Imports a module of an optional package.

    Args:
        module: dotted name, for instance `mlflow.tracking`.
        purpose: what needs it, as the beginning of the message: `the MLflow tracker`.

    Raises:
        MissingExtra: the package is not installed; says which extra of trainkit has it.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        extra = _EXTRAS[package]
        raise MissingExtra(
            f"{purpose} needs the package {package!r}, which is not installed; "
            f"install it with: pip install 'trainkit[{extra}]'",
            name=package,
        ) from None
