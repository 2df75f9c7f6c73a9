"""A thin client of a cluster's API server: JSON over one aiohttp session.

The official client reads the configuration and renews credentials; its typed objects are left alone, for they cost
more than everything else here. Requests are limited on purpose, so that a flood of jobs is no flood for the cluster.
What imports this depends on `aiohttp` and `kubernetes`.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import ssl
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
from kubernetes import config
from kubernetes.client import Configuration

Object = dict[str, Any]
MERGE_PATCH = "application/merge-patch+json"
_METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
_LINE_BYTES = 4 * 1024 * 1024
_TOKEN_S = 10.0  # for so long a token is taken for good: those of clusters are renewed minutes before they expire
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_AWAY = frozenset({408, 429, 500, 502, 503, 504})


class ApiError(Exception):
    """The API server said no, or could not be reached (status 0).

    Attributes:
        status: of HTTP.
        reason: Kubernetes' word for it, for instance "AlreadyExists".
    """

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason

    @property
    def away(self) -> bool:
        """Whether the same request may succeed later."""
        return self.status == 0 or self.status in _AWAY


def is_name(text: str) -> bool:
    """Whether it can be an object's name: as part of a path it leads nowhere else."""
    return _NAME.fullmatch(text) is not None


class Limiter:
    """A token bucket: so many requests at once, so many a second."""

    def __init__(self, per_s: float, burst: int) -> None:
        self._per_s, self._burst = per_s, burst
        self._left, self._since = float(burst), 0.0

    async def admit(self) -> None:
        """Returns when a request may be made."""
        now = asyncio.get_running_loop().time()
        self._left = min(self._burst, self._left + (now - self._since) * self._per_s)
        self._since = now
        self._left -= 1
        if self._left < 0:
            await asyncio.sleep(-self._left / self._per_s)


def load_configuration(kubeconfig: str = "", context: str = "", hint: str = "") -> Configuration:
    """How the API server is reached: as this pod, or by a kubeconfig.

    Args:
        kubeconfig: its file; empty: as the pod this runs in, or by the user's own.
        context: of the kubeconfig; empty: its current one.
        hint: for the message of an error: how a kubeconfig is given.

    Raises:
        ValueError: there is no such configuration.
    """
    configuration = Configuration()
    try:
        if not kubeconfig and not context:
            try:
                config.load_incluster_config(client_configuration=configuration)
                return configuration
            except config.ConfigException:
                pass  # not in a pod
        config.load_kube_config(
            # The library looks at the variable only while it is imported.
            config_file=kubeconfig or os.environ.get("KUBECONFIG") or None,
            context=context or None,
            client_configuration=configuration,
            persist_config=False,
        )
    except (config.ConfigException, OSError) as error:
        raise ValueError(f"no way to the cluster's API server: {error}{f'; {hint}' if hint else ''}") from error
    return configuration


def authorization(configuration: Configuration) -> str:
    """The header that says who asks, for instance "Bearer ..."; "" when a certificate says it. Renews the token."""
    # Under "authorization" in older configurations, and in what other programs made.
    return configuration.get_api_key_with_prefix("BearerToken", alias="authorization") or ""


class Api:
    """Requests to the API server. Lives on the loop's thread.

    Args:
        qps: requests a second, on average.
        burst: requests that may be made at once.
        timeout_s: deadline of one request; watches have none.
    """

    def __init__(
        self, configuration: Configuration, *, qps: float = 100, burst: int = 200, timeout_s: float = 30
    ) -> None:
        self._configuration = configuration
        self._base = str(configuration.host).rstrip("/")
        self._limiter = Limiter(qps, burst)
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._session: aiohttp.ClientSession | None = None
        self._token, self._token_since = "", float("-inf")

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(ssl=_tls(self._configuration), limit=0)
            self._session = aiohttp.ClientSession(
                connector=connector, trust_env=False, read_bufsize=_LINE_BYTES, max_line_size=_LINE_BYTES
            )
        return self._session

    async def get(self, path: str, **params: str) -> Object:
        """Raises ApiError."""
        return await self._request("GET", path, params)

    async def metadata(self, path: str) -> Object:
        """An object's metadata alone: without what a Secret holds. Raises ApiError."""
        found: Object = json.loads(await self._answer("GET", path, {}, accept=_METADATA))
        return found

    async def text(self, path: str, **params: str) -> str:
        """What is no JSON, such as a log. Raises ApiError."""
        return (await self._answer("GET", path, params)).decode(errors="replace")

    async def create(self, path: str, body: Mapping[str, Any]) -> Object:
        """Raises ApiError."""
        return await self._request("POST", path, {}, body)

    async def patch(self, path: str, body: Mapping[str, Any]) -> Object:
        """A merge patch. Raises ApiError."""
        return await self._request("PATCH", path, {}, body, MERGE_PATCH)

    async def delete(self, path: str, **options: Any) -> None:
        """Deletes an object; one that is not there is deleted already. Raises ApiError."""
        try:
            await self._answer("DELETE", path, {}, {"kind": "DeleteOptions", "apiVersion": "v1"} | options)
        except ApiError as error:
            if error.status != 404:
                raise

    async def _request(
        self,
        method: str,
        path: str,
        params: Mapping[str, str],
        body: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
    ) -> Object:
        found: Object = json.loads(await self._answer(method, path, params, body, content_type))
        return found

    async def _answer(
        self,
        method: str,
        path: str,
        params: Mapping[str, str],
        body: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
        accept: str = "*/*",
    ) -> bytes:
        await self._limiter.admit()
        headers = await self._headers() | {"Accept": accept}
        if body is not None:
            headers["Content-Type"] = content_type
        data = json.dumps(body).encode() if body is not None else None
        try:
            async with self._opened().request(
                method, self._base + path, params=params, data=data, headers=headers, timeout=self._timeout
            ) as response:
                content = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _unreachable(error) from error
        if response.status >= 400:
            raise _refusal(response.status, content)
        return content

    async def watch(self, path: str, **params: str) -> AsyncIterator[Object]:
        """Events of a watch until the server ends it. Raises ApiError."""
        await self._limiter.admit()
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=90)
        query = {"watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": "600"} | params
        try:
            async with self._opened().get(
                self._base + path, params=query, headers=await self._headers(), timeout=timeout
            ) as response:
                if response.status >= 400:
                    raise _refusal(response.status, await response.read())
                async for line in response.content:
                    yield json.loads(line)
        except aiohttp.SocketTimeoutError:
            return  # nothing changed for long, or the connection died without a word: the next watch finds out
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise _unreachable(error) from error

    async def websocket(
        self, path: str, params: list[tuple[str, str]], protocol: str
    ) -> aiohttp.ClientWebSocketResponse:
        """An open connection; only its opening has the deadline of a request. Raises ApiError."""
        await self._limiter.admit()
        headers = await self._headers()
        try:
            async with asyncio.timeout(self._timeout.total):
                return await self._opened().ws_connect(
                    self._base + path, params=params, headers=headers, protocols=(protocol,), max_msg_size=0
                )
        except aiohttp.WSServerHandshakeError as error:
            raise ApiError(error.status, "Handshake", error.message) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _unreachable(error) from error

    async def _headers(self) -> dict[str, str]:
        now = asyncio.get_running_loop().time()
        if now - self._token_since >= _TOKEN_S:  # which may read files, or run the program a kubeconfig names
            self._token = await asyncio.to_thread(authorization, self._configuration)
            self._token_since = now
        return {"Authorization": self._token} if self._token else {}

    async def close(self) -> None:
        """Ends every request."""
        if self._session is not None:
            await self._session.close()


def _tls(configuration: Configuration) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
    if configuration.cert_file:
        context.load_cert_chain(configuration.cert_file, configuration.key_file)
    if not configuration.verify_ssl:  # the kubeconfig says insecure-skip-tls-verify
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _unreachable(error: Exception) -> ApiError:
    return ApiError(0, "Unreachable", f"the API server was not reached: {error or type(error).__name__}")


def _refusal(status: int, content: bytes) -> ApiError:
    try:
        found = json.loads(content)
        return ApiError(status, str(found.get("reason", "")), str(found.get("message", "")))
    except (ValueError, AttributeError):
        return ApiError(status, "", content.decode(errors="replace")[:500])
