"""Objects in a bucket of S3, or of anything that speaks its protocol."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import BaseError, NotFoundError
from obstore.store import S3Store
from servicekit.errors import Unavailable

from trainyard_artifacts.objects import ObjectMissing
from trainyard_artifacts.settings import Settings

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig, S3Config

logger = logging.getLogger(__name__)

_MAX_ERROR = 500


class S3Objects:
    """An `ObjectStore` in the bucket that the settings name. Credentials that are not set are those of the environment.

    Raises:
        ValueError: the settings do not fit together.
    """

    def __init__(self, settings: Settings) -> None:
        self._name, _, prefix = settings.s3_bucket.partition("/")
        patience = timedelta(seconds=settings.s3_timeout_s)
        client: ClientConfig = {
            "timeout": patience,
            "connect_timeout": patience,
            "allow_http": settings.s3_endpoint.startswith("http://"),
        }
        retry: RetryConfig = {"retry_timeout": patience}
        self._store = S3Store(
            self._name, prefix=prefix or None, config=_config(settings), client_options=client, retry_config=retry
        )

    async def put(self, key: str, parts: Sequence[bytes]) -> None:
        data = b"".join(parts)
        with self._translated(key):
            await obstore.put_async(self._store, key, data, use_multipart=False)

    async def get(self, key: str, offset: int, size: int) -> bytes:
        with self._translated(key):
            data = bytes(await obstore.get_range_async(self._store, key, start=offset, length=size))
        if len(data) != size:
            raise ObjectMissing(f"{key} is shorter than {offset + size} bytes")
        return data

    async def size(self, key: str) -> int:
        with self._translated(key):
            return (await obstore.head_async(self._store, key))["size"]

    async def delete(self, key: str) -> None:
        with suppress(ObjectMissing), self._translated(key):
            await obstore.delete_async(self._store, key)

    async def list(self, prefix: str) -> list[tuple[str, int]]:
        found: list[tuple[str, int]] = []
        with self._translated(prefix):
            async for page in obstore.list(self._store, prefix.removesuffix("/")):
                found += [(entry["path"], entry["size"]) for entry in page]
        return sorted(found)

    async def free_bytes(self) -> int:
        return 0

    async def close(self) -> None:
        """Nothing runs between calls."""

    @contextmanager
    def _translated(self, key: str) -> Iterator[None]:
        try:
            yield
        except (NotFoundError, FileNotFoundError):
            raise ObjectMissing(key) from None
        except (BaseError, OSError, TimeoutError) as error:
            # What the library says may hold addresses and headers; it goes to the log of the yard, not to callers.
            logger.warning("S3 failed", extra={"bucket": self._name, "key": key, "error": str(error)[:_MAX_ERROR]})
            raise Unavailable(
                f"the bucket '{self._name}' of the artifact store failed ({type(error).__name__})",
                reason="StorageFailed",
                hint="the yard's log has the details; what was stored before is intact; try again",
            ) from error


def _config(settings: Settings) -> S3Config:
    config: S3Config = {}
    if settings.s3_endpoint:
        config["endpoint"] = settings.s3_endpoint
    if settings.s3_region:
        config["region"] = settings.s3_region
    key, secret = settings.s3_access_key_id.get_secret_value(), settings.s3_secret_access_key.get_secret_value()
    if bool(key) != bool(secret):
        raise ValueError("s3_access_key_id and s3_secret_access_key belong together: set both, or neither")
    if key:
        config["access_key_id"], config["secret_access_key"] = key, secret
    return config
