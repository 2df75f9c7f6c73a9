"""`python -m trainyard_embedded`: the yard of one machine, as `yard up` and `yard run` start it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING

from servicekit import logs
from servicekit.server import Tls
from trainyard.endpoints import port_number, without_brackets
from trainyard.home import LOCK_FILE, READER_FILE, YARD_FILE, read_endpoint

from trainyard_embedded.memory import calm_collector
from trainyard_embedded.settings import YardSettings
from trainyard_embedded.yard_servicer import AttachedYardServicer

if TYPE_CHECKING:
    from trainyard_embedded.app import Yard
    from trainyard_embedded.reading import ReadingYard

_HANDOVER_S = 30.0
_HANDOVER_STEP_S = 0.02


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m trainyard_embedded", description=__doc__)
    parser.add_argument("--home", type=Path, required=True, help="folder with everything the yard keeps")
    parser.add_argument("--ephemeral", action="store_true", help="end when no client is attached and no job is active")
    parser.add_argument("--read-only", action="store_true", help="answer what commands read, beside any other yard")
    parser.add_argument("--ready-fd", type=int, default=-1, help="write one JSON line here: the endpoint, or the error")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; beyond loopback needs TLS")
    parser.add_argument("--port", type=port_number, default=0, help="port; 0 for the last one used, or a free one")
    parser.add_argument("--tls-cert", type=Path, help="certificate chain, PEM")
    parser.add_argument("--tls-key", type=Path, help="private key, PEM")
    parser.add_argument("--tls-ca", type=Path, help="root certificate that clients of this machine check, PEM")
    parser.add_argument("--metrics-port", type=port_number, default=0, help="serve Prometheus metrics on this port")
    return parser.parse_args()


def _settings(arguments: argparse.Namespace) -> YardSettings:
    if bool(arguments.tls_cert) != bool(arguments.tls_key):
        raise ValueError("--tls-cert and --tls-key go together")
    tls = Tls(arguments.tls_cert, arguments.tls_key) if arguments.tls_cert else None
    return YardSettings(
        home=arguments.home.absolute(),
        host=without_brackets(arguments.host),
        port=arguments.port,
        ephemeral=arguments.ephemeral or arguments.read_only,
        read_only=arguments.read_only,
        tls=tls,
        tls_ca=arguments.tls_ca or arguments.tls_cert,
        metrics_port=arguments.metrics_port,
    )


def _lock(home: Path, *, read_only: bool) -> IO[str]:
    """Held for the life of the process: one yard a home, and one that only reads. One that is going down is waited for.

    Raises:
        RuntimeError: a yard serves this home already.
    """
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock, published = ("reader.lock", READER_FILE) if read_only else (LOCK_FILE, YARD_FILE)
    file = (home / lock).open("w")
    give_up = time.monotonic() + _HANDOVER_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if read_endpoint(home, published) is not None or time.monotonic() > give_up:
                raise RuntimeError(f"a yard already serves {home}: 'yard down' ends it") from None
        # Its holder either begins to serve or ends; no single event stands for both.
        time.sleep(_HANDOVER_STEP_S)


def _tell(descriptor: int, message: dict[str, str]) -> None:
    if descriptor >= 0:
        with os.fdopen(descriptor, "w") as ready:
            ready.write(json.dumps(message) + "\n")


def _tell_error(descriptor: int, error: Exception) -> None:
    """A ValueError is the caller's: an option or a setting is wrong."""
    print(f"error: {error}", file=sys.stderr)  # noqa: T201
    _tell(descriptor, {"error": str(error), "whose": "caller" if isinstance(error, ValueError) else "yard"})


def _make(settings: YardSettings) -> Yard | ReadingYard:
    # What one of them imports, the other does without.
    if settings.read_only:
        from trainyard_embedded.reading import ReadingYard

        return ReadingYard(settings)
    from trainyard_embedded.app import Yard

    return Yard(settings)


async def _serve(settings: YardSettings, ready_fd: int) -> None:
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    yard = _make(settings)
    await yard.start()
    calm_collector()
    if not settings.ephemeral:  # a yard for one command serves while its last services still come up
        await yard.whole()
    if yard.failure is None:
        _tell(ready_fd, {"endpoint": yard.endpoint})
    await _until_over(settings, yard.servicer, ended)
    await yard.stop()
    if isinstance(yard.failure, ValueError):
        raise yard.failure
    if yard.failure is not None:
        raise RuntimeError(f"the yard ended because a service could not start: {yard.failure}") from yard.failure


async def _until_over(settings: YardSettings, servicer: AttachedYardServicer, ended: asyncio.Event) -> None:
    reasons: list[asyncio.Task[object]] = [
        asyncio.create_task(ended.wait()),
        asyncio.create_task(servicer.ended.wait()),
    ]
    if settings.ephemeral:
        reasons.append(asyncio.create_task(servicer.until_unused()))
    try:
        done, _ = await asyncio.wait(reasons, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in reasons:
            task.cancel()


def main() -> int:
    arguments = _arguments()
    logs.configure()
    try:
        settings = _settings(arguments)
        lock = _lock(settings.home, read_only=settings.read_only)
    except (ValueError, RuntimeError, OSError) as error:
        _tell_error(arguments.ready_fd, error)
        return 1
    with lock:
        try:
            asyncio.run(_serve(settings, arguments.ready_fd))
        except (ValueError, RuntimeError) as error:
            with contextlib.suppress(OSError):  # already told, and closed
                _tell_error(arguments.ready_fd, error)
            return 1
    return 0


if __name__ == "__main__":
    code = main()
    # Everything is closed. Taking the interpreter apart takes most of a second, for which others would wait.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
