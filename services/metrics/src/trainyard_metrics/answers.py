"""Answers that were given, as long as there is room: dashboards ask the same again and again."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b

from trainyard_protos.v1.metrics_pb2 import QuerySeriesResponse


class Answers:
    """The answers used last, by everything they depend on; they are not to be changed."""

    def __init__(self, max_bytes: int) -> None:
        self._room = max_bytes
        self._found: OrderedDict[bytes, tuple[QuerySeriesResponse, int]] = OrderedDict()

    def get(self, key: bytes) -> QuerySeriesResponse | None:
        """The answer kept for a key."""
        digest = _digest(key)
        found = self._found.get(digest)
        if found is None:
            return None
        self._found.move_to_end(digest)
        return found[0]

    def put(self, key: bytes, answer: QuerySeriesResponse) -> None:
        """Keeps an answer, in place of those that nobody asked for in the longest time."""
        digest, size = _digest(key), answer.ByteSize()
        _, replaced = self._found.pop(digest, (None, 0))
        self._found[digest] = (answer, size)
        self._room += replaced - size
        while self._room < 0:
            _, (_, dropped) = self._found.popitem(last=False)
            self._room += dropped


def _digest(key: bytes) -> bytes:
    return blake2b(key, digest_size=16).digest()
