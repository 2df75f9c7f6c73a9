"""Configuration: a dataclass or a YAML file, checked strictly, saved with the run. Nothing here imports torch.

$ python -m trainkit.config check run.yaml
$ python -m trainkit.config schema > run.schema.json
"""

from trainkit.config.checking import from_dict, load, parse
from trainkit.config.components import Component, OfKind
from trainkit.config.problems import ConfigError, Problem
from trainkit.config.run import CheckpointSettings, DurationText, RunConfig
from trainkit.config.schema import schema

__all__ = [
    "CheckpointSettings",
    "Component",
    "ConfigError",
    "DurationText",
    "OfKind",
    "Problem",
    "RunConfig",
    "from_dict",
    "load",
    "parse",
    "schema",
]
