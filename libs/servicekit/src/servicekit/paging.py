"""Pages of lists: bounded sizes, opaque tokens."""

from __future__ import annotations

import base64
import binascii

from servicekit.errors import InvalidArgument


def page_size(wanted: int, *, default: int, most: int) -> int:
    """How many entries a page has; 0 means the default, more than `most` is cut to it.

    Raises:
        InvalidArgument: it is negative.
    """
    if wanted < 0:
        raise InvalidArgument(
            f"page_size is {wanted}; allowed: 0 (the default, {default}) to {most}", reason="InvalidPage"
        )
    return min(wanted or default, most)


def encode_token(last_id: str) -> str:
    """Where the next page begins."""
    return base64.urlsafe_b64encode(last_id.encode()).decode()


def decode_token(token: str) -> str:
    """The id a token was made of.

    Raises:
        InvalidArgument: it is no token of ours.
    """
    try:
        return base64.b64decode(token.encode(), altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeError, ValueError) as error:
        raise InvalidArgument(
            "page_token is not one this service gave",
            reason="InvalidPage",
            hint="give next_page_token of the last answer",
        ) from error
