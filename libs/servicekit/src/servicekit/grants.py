"""Which artifacts an attempt may use: claims of its token, as names.

A token travels with each call, so it has to stay small. Names longer than a hash are kept as one; versions are not
listed at all.
"""

from __future__ import annotations

import hashlib
from base64 import urlsafe_b64encode
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_HASH_BYTES = 15
_HASH_MARK = "#"  # no name and no id has it
_LONGEST = 21  # characters of a name that is kept as it is: as long as a hash with its mark
_MOST = 256  # names of one kind; a job has at most 64 inputs and 64 outputs


@dataclass(frozen=True, slots=True)
class Grants:
    """Artifacts of others that an attempt may use. What its own job made, checkpoints included, needs no grant.

    Args:
        write: artifacts to which it may add versions: the job's outputs.
        read: artifacts, or ids of versions, that it may read: the job's inputs and code.
    """

    write: frozenset[str] = frozenset()
    read: frozenset[str] = frozenset()

    @classmethod
    def of(cls, *, write: Iterable[str] = (), read: Iterable[str] = ()) -> Grants:
        """Grants for these names and ids."""
        return cls(frozenset(map(_short, write)), frozenset(map(_short, read)))

    @classmethod
    def from_claim(cls, claim: object) -> Grants | None:
        """Grants as they are in a token; None for a token that has none, which was minted by an older version.

        Raises:
            ValueError: the claim is not what `claim` makes.
        """
        if claim is None:
            return None
        if not isinstance(claim, Mapping):
            raise ValueError("the claim 'art' is not a mapping")
        return cls(_names(claim, "w"), _names(claim, "r"))

    def claim(self) -> dict[str, list[str]]:
        """What a token says."""
        return {"w": sorted(self.write), "r": sorted(self.read)}

    def may_write(self, name: str) -> bool:
        """Whether versions of an artifact may be made."""
        return _short(name) in self.write

    def may_read(self, name: str) -> bool:
        """Whether an artifact, or a version by its id, may be read."""
        return _short(name) in self.read


def _names(claim: Mapping[object, object], key: str) -> frozenset[str]:
    found = claim.get(key)
    if not isinstance(found, list) or len(found) > _MOST or not all(isinstance(name, str) for name in found):
        raise ValueError(f"the claim 'art.{key}' is not a list of names")
    return frozenset(found)


def _short(name: str) -> str:
    if len(name) <= _LONGEST:
        return name
    digest = hashlib.blake2b(name.encode(), digest_size=_HASH_BYTES).digest()
    return _HASH_MARK + urlsafe_b64encode(digest).decode()
