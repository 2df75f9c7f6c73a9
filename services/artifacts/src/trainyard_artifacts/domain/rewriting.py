"""Which packs are worth rewriting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

SMALL_BYTES = 1024 * 1024
_SMALL_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Occupancy:
    """How full a pack is, in bytes: the whole object, the chunks that were stored in it, those that still are."""

    workspace: str
    id: str
    size: int
    data: int
    living: int


def groups(packs: Sequence[Occupancy], below: float, batch_bytes: int) -> Iterator[list[Occupancy]]:
    """Packs whose living chunks go together into one new pack of about `batch_bytes`.

    Those are the packs with less than the part `below` of living bytes, and, once there are many of them in a
    workspace, small ones.
    """
    for workspace in sorted({pack.workspace for pack in packs}):
        own = [pack for pack in packs if pack.workspace == workspace and pack.living]
        hollow = [pack for pack in own if pack.living < below * pack.data]
        small = [pack for pack in own if pack.size < SMALL_BYTES and pack not in hollow]
        chosen = hollow + (small if len(small) >= _SMALL_AT_ONCE else [])
        yield from _together(chosen, batch_bytes)


def _together(packs: Sequence[Occupancy], batch_bytes: int) -> Iterator[list[Occupancy]]:
    group: list[Occupancy] = []
    for pack in packs:
        if group and sum(other.living for other in group) + pack.living > batch_bytes:
            yield group
            group = []
        group.append(pack)
    if group:
        yield group
