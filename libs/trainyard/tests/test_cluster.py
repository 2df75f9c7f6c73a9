"""The client of a cluster's API server."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.client import Configuration
from trainyard.cluster import Api, ApiError


async def test_an_api_server_that_does_not_answer_keeps_no_connection_waiting() -> None:
    released = asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        await released.wait()
        return web.Response()

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with TestServer(app) as server:
        configuration = Configuration()
        configuration.host = str(server.make_url("/"))
        api = Api(configuration, timeout_s=0.1)
        with pytest.raises(ApiError) as refused:
            await api.websocket("/portforward", [("ports", "1")], "v4.channel.k8s.io")
        assert refused.value.away
        released.set()
        await api.close()
