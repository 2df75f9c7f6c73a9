"""How a service that runs alone is told where everything is: flags, or environment variables of the same names.

`--database-url` is `TRAINYARD_SERVICE_DATABASE_URL`; a flag wins. Addresses that hold passwords belong in the
environment, where other users of the machine cannot see them.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationError, model_validator
from trainyard.endpoints import join_host_port, split_host_port

from servicekit.auth import PUBLIC_KEY_FILE
from servicekit.server import Tls
from servicekit.settings import Settings

ENVIRONMENT = "TRAINYARD_SERVICE"


class Address(BaseModel, frozen=True):
    """Where to listen."""

    host: str
    port: int = Field(ge=0, le=65535)

    def __str__(self) -> str:
        return join_host_port(self.host, self.port)


def _address(value: object) -> object:
    if not isinstance(value, str):
        return value
    host, port = split_host_port(value)
    return Address(host=host, port=port)


def _endpoint(value: str) -> str:
    split_host_port(value)
    return value


ListenAddress = Annotated[Address, BeforeValidator(_address)]
Endpoint = Annotated[str, AfterValidator(_endpoint)]
"""`host:port` of a server elsewhere."""


class Options(Settings):
    """What every service needs."""

    home: Path = Field(description="folder for what this service keeps on disk")
    listen: ListenAddress = Field(description="host:port for gRPC; beyond loopback needs TLS")
    metrics_listen: ListenAddress | None = Field(
        None, description="host:port for /metrics, /healthz and /readyz over HTTP; none: not served"
    )
    tls_cert: Path | None = Field(None, description="certificate chain of this service, PEM")
    tls_key: Path | None = Field(None, description="its private key, PEM")
    token_file: Path | None = Field(None, description="the users' bearer token; default: HOME/token")
    metrics_token_file: Path | None = Field(
        None, description="a bearer token that opens /metrics and nothing else; none: only the users' token does"
    )
    operator_token_file: Path | None = Field(
        None, description="the operator's bearer token; none: the operator has no token of its own"
    )
    attempt_key: Path | None = Field(
        None, description=f"public key that attempts' tokens are checked with, PEM; default: HOME/{PUBLIC_KEY_FILE}"
    )
    log_level: str = Field("INFO", pattern="^(DEBUG|INFO|WARNING|ERROR)$", description="least level that is logged")

    @model_validator(mode="after")
    def _tls_is_whole(self) -> Options:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together")
        return self

    @property
    def tls(self) -> Tls | None:
        """What the servers listen with."""
        return Tls(self.tls_cert, self.tls_key) if self.tls_cert and self.tls_key else None

    def token(self) -> str:
        """The users' token.

        Raises:
            ValueError: its file cannot be read or holds none.
        """
        return _token("token_file", self.token_file or self.home / "token")

    def metrics_token(self) -> str:
        """The token that opens `/metrics` alone; "" for none.

        Raises:
            ValueError: its file cannot be read or holds none.
        """
        return _token("metrics_token_file", self.metrics_token_file) if self.metrics_token_file else ""

    def operator_token(self) -> str:
        """The operator's token; "" for none.

        Raises:
            ValueError: its file cannot be read or holds none.
        """
        return _token("operator_token_file", self.operator_token_file) if self.operator_token_file else ""


def _token(option: str, path: Path) -> str:
    try:
        token = path.read_text().strip()
    except OSError as error:
        raise ValueError(f"{option}: cannot read {path}: {error.strerror}") from error
    if not token:
        raise ValueError(f"{option}: {path} is empty")
    return token


class DatabaseOptions(Options):
    """Those of a service with a database of its own."""

    database_url: str = Field(
        "",
        pattern=r"^$|^sqlite:///|^postgresql\+psycopg://",
        description="sqlite:///PATH or postgresql+psycopg://USER:PASSWORD@HOST:PORT/NAME, of this service alone; "
        "default: a SQLite file in HOME",
    )

    def database(self, name: str) -> str:
        """The address, with the default applied."""
        return self.database_url or f"sqlite:///{self.home}/{name}.db"


class BrokerOptions(Options):
    """Those of a service that sends or takes messages."""

    broker_url: str = Field(
        pattern=r"^rediss?://", description="Redis that carries messages: redis://:PASSWORD@HOST:PORT/NUMBER"
    )


O = TypeVar("O", bound=Options)  # noqa: E741


def parse(
    model: type[O], parser: argparse.ArgumentParser, arguments: Sequence[str], environ: Mapping[str, str] = os.environ
) -> O:
    """Options from flags and, for those that are not given, from the environment.

    Raises:
        ValueError: one is missing, unknown or wrong; the message names every one.
    """
    for name, field in model.model_fields.items():
        needed = " (needed)" if field.is_required() else ""
        shown = f"{field.description}{needed}".replace("%", "%%")
        parser.add_argument(f"--{name.replace('_', '-')}", help=shown, default=None, metavar="VALUE")
    given = {name: value for name, value in vars(parser.parse_args(arguments)).items() if value is not None}
    return merge(model, given, environ)


def merge(model: type[O], given: Mapping[str, object], environ: Mapping[str, str]) -> O:
    """Options that were given, and for the others `TRAINYARD_SERVICE_*` of the environment.

    Raises:
        ValueError: as for `parse`.
    """
    prefix = f"{ENVIRONMENT}_"
    found = {name.removeprefix(prefix).lower(): value for name, value in environ.items() if name.startswith(prefix)}
    try:
        return model.model_validate(found | dict(given))
    except ValidationError as error:
        raise ValueError("; ".join(_told(each["loc"], each["msg"]) for each in error.errors())) from error


def _told(location: tuple[int | str, ...], message: str) -> str:
    if not location:
        return message
    name = str(location[0])
    return f"{name} (--{name.replace('_', '-')} or {ENVIRONMENT}_{name.upper()}): {message}"
