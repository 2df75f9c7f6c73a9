"""A launcher in a process of its own, so that it can be killed: `launcher_process.py HOME SCHEDULER POOL`."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from prometheus_client import CollectorRegistry
from servicekit import server as servers
from servicekit.auth import AttemptTokens, Authenticator, bearer_token
from servicekit.celery import celery_app
from trainyard_launcher.app import Launcher
from trainyard_launcher.backends.process import ProcessBackend
from trainyard_launcher.settings import Settings


async def main(home: Path, scheduler: str, pool: str) -> None:
    tokens = AttemptTokens.load_or_create(home)
    settings = Settings(pool=pool, capacity_gpu=0, reconcile_s=0.5)
    agent = (sys.executable, str(Path(__file__).with_name("small_agent.py")))
    server = servers.build(Authenticator(bearer_token(home), tokens), CollectorRegistry())
    port = servers.listen(server, "127.0.0.1", 0)
    launcher = Launcher(
        home=home,
        celery=celery_app(),
        endpoint=scheduler,
        token=bearer_token(home),
        tokens=tokens,
        backend=ProcessBackend(home, settings, agent),
        registered=_ignore,
        settings=settings,
    )
    launcher.register(server)
    await server.start()
    draft = home / "yard.json.new"
    draft.write_text(json.dumps({"endpoint": f"127.0.0.1:{port}"}))
    draft.rename(home / "yard.json")
    await launcher.start()
    await server.wait_for_termination()


async def _ignore(_registered: bool) -> None:
    """Nobody asks for the health of this one."""


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3]))
