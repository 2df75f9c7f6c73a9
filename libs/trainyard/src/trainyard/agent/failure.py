"""What ends a node before its workers could, in the words of an exit record."""

from __future__ import annotations


class NodeFailed(Exception):
    """The node cannot go on.

    Attributes:
        reason: one of the typed reasons of `Exit`.
        message: what is wrong and what to do.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
