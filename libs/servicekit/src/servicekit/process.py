"""The main program of a service that runs alone: `python -m trainyard_metrics`, and so on.

It reads options and settings, composes the service with the same function that the yard of one machine uses, serves
until SIGTERM or SIGINT, and ends gracefully: watchers of its health first learn of it, writes are finished.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic

import sqlalchemy
from pydantic import BaseModel

from servicekit import logs
from servicekit.auth import PUBLIC_KEY_FILE, AttemptVerifier
from servicekit.disk import require_writable
from servicekit.host import Host
from servicekit.options import ENVIRONMENT, O, Options, parse
from servicekit.service import Service

logger = logging.getLogger(__name__)

_OPERATOR_ERRORS = (ValueError, RuntimeError, OSError, sqlalchemy.exc.OperationalError)


def public_key(options: Options) -> AttemptVerifier:
    """What a service that mints no tokens verifies attempts with.

    Raises:
        ValueError: there is no such key.
    """
    return AttemptVerifier.load(options.attempt_key or options.home / PUBLIC_KEY_FILE)


@dataclass(frozen=True, slots=True)
class Context(Generic[O]):
    """What a service is composed of.

    Attributes:
        metrics_url: where the metrics of this process are served; "" when they are not.
    """

    options: O
    host: Host
    token: str
    tokens: AttemptVerifier
    metrics_url: str


@dataclass(frozen=True, slots=True)
class Program(Generic[O]):
    """One service as a program.

    Args:
        name: of the service.
        purpose: one sentence for `--help`.
        options: where everything is.
        settings: bounds and times, set by `TRAINYARD_<NAME>_<FIELD>`.
        compose: makes the service.
        tokens: reads the key for attempts' tokens.
    """

    name: str
    purpose: str
    options: type[O]
    settings: type[BaseModel]
    compose: Callable[[Context[O]], Service]
    tokens: Callable[[Any], AttemptVerifier] = public_key


def main(program: Program[O], arguments: Sequence[str] | None = None) -> int:
    """Runs the service to its end; returns the exit code: 0 ended as asked, 1 could not serve, 2 wrong options."""
    parser = _parser(program)
    try:
        options = parse(program.options, parser, sys.argv[1:] if arguments is None else arguments)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 2
    _forget_environment()
    logs.configure(options.log_level)
    try:
        asyncio.run(_serve(program, options))
    except _OPERATOR_ERRORS as error:
        logger.debug("failed", exc_info=error)
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


def run(program: Program[O]) -> None:
    """`main`, then out: everything is closed, and taking the interpreter apart takes most of a second."""
    code = main(program)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _parser(program: Program[O]) -> argparse.ArgumentParser:
    prefix = f"TRAINYARD_{program.name.upper()}"
    lines = [
        f"  {prefix}_{name.upper()}={field.get_default(call_default_factory=True)}".replace("%", "%%")
        for name, field in program.settings.model_fields.items()
    ]
    return argparse.ArgumentParser(
        prog=f"python -m trainyard_{program.name}",
        description=program.purpose,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=(
            f"Every option can be given as {ENVIRONMENT}_<NAME> in the environment instead, which is the place for\n"
            f"addresses with passwords. Settings, from the environment alone, with their defaults:\n" + "\n".join(lines)
        ),
    )


def _forget_environment() -> None:
    """Passwords in addresses are not for processes that this one starts."""
    for name in [name for name in os.environ if name.startswith(f"{ENVIRONMENT}_")]:
        del os.environ[name]


async def _serve(program: Program[O], options: O) -> None:
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    require_writable(options.home)
    token, tokens = options.token(), program.tokens(options)
    metrics_token, operator_token = options.metrics_token(), options.operator_token()
    host = Host([program.name], options.home, token, tokens, metrics_token=metrics_token, operator_token=operator_token)
    metrics_url = ""
    if options.metrics_listen is not None:
        metrics_url = await host.expose(options.metrics_listen.host, options.metrics_listen.port, options.tls)
    service = program.compose(Context(options, host, token, tokens, metrics_url))
    service.register(host.server)
    try:
        if await _started(service, ended):
            await _serve_until(ended, program.name, service, host, options)
    finally:
        await host.stop()


async def _started(service: Service, ended: asyncio.Event) -> bool:
    """Whether the service started before this process was asked to end: one that stands by may wait for long."""
    starting, asked = asyncio.ensure_future(service.start()), asyncio.ensure_future(ended.wait())
    await asyncio.wait({starting, asked}, return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()
    if starting.done():
        starting.result()
        return True
    starting.cancel()
    return False


async def _serve_until(ended: asyncio.Event, name: str, service: Service, host: Host, options: Options) -> None:
    # The port opens last: until then, callers are sent to whoever serves.
    address = options.listen
    port = host.listen(address.host, address.port, options.tls)
    await host.server.start()
    await host.health.set(name, True)
    logger.info("serving", extra={"service": name, "host": address.host, "port": port})
    await ended.wait()
    logger.info("ending", extra={"service": name})
    await host.health.leave()
    await service.stop()
