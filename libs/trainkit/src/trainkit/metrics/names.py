"""The names of an evaluation's results: `SET/loss` and `SET/METRIC`, or `SET/METRIC/PART`."""

from __future__ import annotations

from collections.abc import Collection

from trainkit.catalogue import nearest
from trainkit.errors import InvalidSetup


def refuse_unknown(name: str, sets: Collection[str], metrics: Collection[str]) -> None:
    """Refuses, before training, a result that no evaluation will have.

    Args:
        name: of the result.
        sets: the names of the evaluation sets.
        metrics: the names of the metrics.

    Raises:
        InvalidSetup: there is no such set or metric; says which there are.
    """
    if not sets:
        raise InvalidSetup(
            f"nothing is evaluated, so there will be no result {name!r}: give the trainer evaluate=..., a Loader"
        )
    known = [f"{each}/{value}" for each in sets for value in ("loss", *metrics)]
    if any(name == each or name.startswith(f"{each}/") for each in known):
        return
    near = nearest(name, known)
    raise InvalidSetup(
        f"no result is called {name!r}; there will be: {', '.join(known)}" + (f"; did you mean {near}?" if near else "")
    )
