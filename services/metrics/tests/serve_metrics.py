"""The ingestor as a process, for tests that kill it: `serve_metrics.py HOME [SETTINGS]` prints its port."""

import asyncio
import sys
from pathlib import Path

from prometheus_client import CollectorRegistry
from servicekit import server as servers
from servicekit.auth import AttemptTokens, Authenticator, bearer_token
from trainyard_metrics.app import Metrics
from trainyard_metrics.settings import Settings


async def main(home: Path, settings: Settings) -> None:
    app = Metrics(home=home, database_url=f"sqlite:///{home}/metrics.db", settings=settings)
    authenticator = Authenticator(bearer_token(home), AttemptTokens.load_or_create(home))
    server = servers.build(authenticator, CollectorRegistry())
    app.register(server)
    port = servers.listen(server, "127.0.0.1", 0)
    await app.start()
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


asyncio.run(main(Path(sys.argv[1]), Settings.model_validate_json(sys.argv[2] if sys.argv[2:] else "{}")))
