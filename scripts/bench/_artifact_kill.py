"""Uploads a folder and kills itself when so many bytes are stored.

_artifact_kill.py ENDPOINT TOKEN FOLDER BYTES    prints how many were stored then
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from trainyard.artifacts import send
from trainyard.channel import connect
from trainyard_protos.v1.artifacts_pb2_grpc import ArtifactServiceStub


async def upload(endpoint: str, token: str, folder: str, limit: str) -> None:
    stored = 0

    def progress(done: int) -> None:
        nonlocal stored
        stored += done
        if stored >= int(limit):
            print(stored, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

    async with connect(endpoint, token) as channel:
        await send(ArtifactServiceStub(channel), "default", Path(folder), progress=progress)


asyncio.run(upload(*sys.argv[1:]))
