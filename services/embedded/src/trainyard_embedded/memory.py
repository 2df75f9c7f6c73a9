"""How the garbage collector of a yard works."""

from __future__ import annotations

import gc

_YOUNG_OBJECTS = 10_000


def calm_collector() -> None:
    """Call it when the yard serves: what was imported and built so far lives as long as the process and need not be
    looked at again. A thousand jobs at once make many objects that are soon gone; seldom looks find them all the same.
    """
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, 10, 10)
