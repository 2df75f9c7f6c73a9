"""`python -m trainyard_launcher`: the launcher alone, for the machine it runs on."""

import os
from pathlib import Path

from pydantic import Field
from servicekit.auth import PRIVATE_KEY_FILE, AttemptTokens, AttemptVerifier
from servicekit.celery import celery_app
from servicekit.options import BrokerOptions, Endpoint
from servicekit.process import Context, Program, run

from trainyard_launcher.app import Launcher
from trainyard_launcher.compose import compose
from trainyard_launcher.settings import Settings


class Options(BrokerOptions):
    """Where everything is."""

    endpoint: Endpoint = Field(
        description="host:port at which the launcher and its agents reach every service of the yard",
    )
    ca_file: Path | None = Field(None, description="root certificate of that endpoint, PEM; needed beyond loopback")
    attempt_key: Path | None = Field(
        None, description=f"private key that attempts' tokens are signed with, PEM; default: HOME/{PRIVATE_KEY_FILE}"
    )


def _private_key(options: Options) -> AttemptVerifier:
    return AttemptTokens.load_private(options.attempt_key or options.home / PRIVATE_KEY_FILE)


def _compose(context: Context[Options]) -> Launcher:
    options = context.options
    assert isinstance(context.tokens, AttemptTokens)
    return compose(
        home=options.home,
        celery=celery_app(options.broker_url),
        endpoint=options.endpoint,
        token=context.token,
        tokens=context.tokens,
        environ=os.environ,
        ca_file=options.ca_file,
        registry=context.host.registry,
        registered=context.host.health.condition("launcher", "registered"),
    )


PROGRAM = Program(
    "launcher", "Turns admitted attempts into processes and keeps watch.", Options, Settings, _compose, _private_key
)

if __name__ == "__main__":
    run(PROGRAM)
