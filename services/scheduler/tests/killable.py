"""A scheduler in a process of its own, for tests that kill it: `python killable.py HOME PORT DATABASE`.

Messages go through files, so that they outlive the process as they would in a broker.
"""

import asyncio
import sys
from pathlib import Path

from celery import Celery
from prometheus_client import CollectorRegistry
from servicekit import server as grpc_server
from servicekit.auth import AttemptTokens, Authenticator, bearer_token
from servicekit.celery import celery_app
from trainyard_scheduler.app import Scheduler
from trainyard_scheduler.settings import Settings


def broker(home: Path) -> Celery:
    folder = home / "messages"
    folder.mkdir(exist_ok=True)
    app = celery_app("filesystem://")
    app.conf.broker_transport_options.update(
        data_folder_in=str(folder), data_folder_out=str(folder), control_folder=str(home / "control")
    )
    return app


async def serve(home: Path, port: int, database_url: str) -> None:
    scheduler = Scheduler(
        home=home,
        database_url=database_url,
        celery=broker(home),
        settings=Settings(reclaim_after_s=0.5),
        registry=None,
    )
    server = grpc_server.build(
        Authenticator(bearer_token(home), AttemptTokens.load_or_create(home)), CollectorRegistry()
    )
    scheduler.register(server)
    grpc_server.listen(server, "127.0.0.1", port)
    await scheduler.start()
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
