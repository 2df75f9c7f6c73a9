"""What can go wrong with a tree of files on this side of the wire.

    ArtifactError
    ├── UnsafePath      a path or link that could leave its tree, or that other machines could not hold
    ├── BadManifest     a manifest that contradicts itself
    ├── TreeTooLarge    more than a caller wanted to send
    ├── FileChanged     a file changed while it was read
    ├── Damaged         bytes that came back are not the bytes that were stored
    ├── NoRoom          the disk has no room for a download
    ├── TargetExists    a download would overwrite something
    └── TargetBusy      two downloads into the same place

What the store itself refuses arrives as `grpc.aio.AioRpcError`.
"""

from __future__ import annotations


class ArtifactError(Exception):
    """Root: `reason` is a stable code, `hint` what to do next."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    @property
    def reason(self) -> str:
        return type(self).__name__


class UnsafePath(ArtifactError):
    pass


class BadManifest(ArtifactError):
    pass


class TreeTooLarge(ArtifactError):
    pass


class FileChanged(ArtifactError):
    pass


class Damaged(ArtifactError):
    pass


class NoRoom(ArtifactError):
    pass


class TargetExists(ArtifactError):
    pass


class TargetBusy(ArtifactError):
    pass
