"""Where packs are: immutable objects by key, in a folder or in a bucket.

Whoever writes an object knows its key to be new; nothing is ever changed in place. Keys are made of checked workspace
names and of ids, never of what a user typed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class ObjectMissing(Exception):
    """There is no such object, or it is shorter than what was asked for."""


class ObjectStore(Protocol):
    """Objects by key ("packs/<workspace>/<id>").

    Every method raises ResourceExhausted (DiskFull) when there is no space left, and Unavailable (StorageFailed) when
    the store cannot be reached or fails.
    """

    async def put(self, key: str, parts: Sequence[bytes]) -> None:
        """Stores the parts, one after the other, as one object: durable when this returns, or not there at all."""

    async def get(self, key: str, offset: int, size: int) -> bytes:
        """`size` bytes from `offset`. Raises ObjectMissing."""

    async def size(self, key: str) -> int:
        """Bytes of an object. Raises ObjectMissing."""

    async def delete(self, key: str) -> None:
        """Removes an object; one that is gone already is no error."""

    async def list(self, prefix: str) -> list[tuple[str, int]]:
        """Keys below a prefix that ends with "/", and their sizes in bytes; also of what was never finished."""

    async def free_bytes(self) -> int:
        """Space that is left; 0 when that is not known."""

    async def close(self) -> None:
        """Ends what it has running."""
