"""Other processes of a run that went away."""

from __future__ import annotations

_SIGNS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket closed",
    "remote process exited",
)


def note_loss(error: BaseException) -> None:
    """Says of an error that tells of a broken connection where to look for the reason."""
    if any(sign in str(error) for sign in _SIGNS):
        error.add_note(
            "Another process of this run ended before: what went wrong is in its output, or it was killed (then look "
            "at the machine's memory). Start all of them again; with checkpoints they go on from the last one."
        )
