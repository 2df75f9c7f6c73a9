"""Settings of a service: a frozen pydantic model, each field with a default, overridden by environment variables.

`TRAINYARD_SCHEDULER_RECLAIM_AFTER_S=5` sets `reclaim_after_s` of the scheduler.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError


class Settings(BaseModel):
    """Base of every service's settings."""

    model_config = ConfigDict(frozen=True, extra="forbid")


S = TypeVar("S", bound=BaseModel)


def from_environment(model: type[S], prefix: str, environ: Mapping[str, str] | None = None) -> S:
    """Settings with every `<prefix>_<FIELD>` of the environment applied.

    Raises:
        ValueError: a variable names no field (the nearest one is given), or its value does not fit.
    """
    start = prefix.upper() + "_"
    given = {
        name.removeprefix(start).lower(): value
        for name, value in (os.environ if environ is None else environ).items()
        if name.startswith(start)
    }
    for field in given.keys() - model.model_fields.keys():
        near = difflib.get_close_matches(field, model.model_fields, n=1)
        meant = (
            f"; did you mean {start}{near[0].upper()}?" if near else f"; known: {', '.join(sorted(model.model_fields))}"
        )
        raise ValueError(f"environment variable {start}{field.upper()} sets nothing{meant}")
    try:
        return model.model_validate(given)
    except ValidationError as error:
        wrong = "; ".join(f"{start}{'_'.join(map(str, e['loc'])).upper()}: {e['msg']}" for e in error.errors())
        raise ValueError(f"wrong settings in the environment: {wrong}") from error
