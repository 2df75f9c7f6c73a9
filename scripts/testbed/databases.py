"""Redis and PostgreSQL."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

import psutil
import psycopg
import redis

from scripts.testbed import fetch
from scripts.testbed.server import Server, unprivileged


class Redis(Server):
    """Keeps nothing on disk: stopped, it has forgotten everything, which is the worst that can happen to a broker."""

    name = "redis"

    def __init__(self, folder: Path, port: int = 0) -> None:
        super().__init__(folder, port)
        self.password = secrets.token_urlsafe(16)
        self._program = fetch.debian("redis-server", "/usr/bin/redis-server")

    def url(self, database: int = 0) -> str:
        return f"redis://:{self.password}@127.0.0.1:{self.port}/{database}"

    def command(self) -> list[str]:
        options = {"bind": "127.0.0.1", "port": self.port, "requirepass": self.password, "save": "", "appendonly": "no"}
        return [str(self._program.path), *(part for key, value in options.items() for part in (f"--{key}", str(value)))]

    def environ(self) -> Mapping[str, str]:
        return self._program.environ()

    def ready(self) -> bool:
        try:
            with redis.Redis.from_url(self.url(), socket_timeout=1) as client:
                return bool(client.ping())
        except redis.RedisError:
            return False

    def wipe(self, database: int | None = None) -> None:
        """Forgets everything, or everything in one database."""
        with redis.Redis.from_url(self.url(database or 0)) as client:
            client.flushall() if database is None else client.flushdb()


class Postgres(Server):
    """One cluster with a superuser `trainyard`.

    PostgreSQL refuses to run as root; then it runs as the system's `postgres`, or `nobody`, who owns its data.
    """

    name = "postgres"
    graceful = signal.SIGINT  # its "fast" shutdown: clients are disconnected

    def __init__(self, folder: Path, port: int = 0, *, durable: bool = False) -> None:
        """
        Args:
            durable: whether commits wait for the disk. Tests kill processes, not machines, and do not need it.
        """
        super().__init__(folder, port)
        self._durable = durable
        self._program = fetch.debian("postgresql-15", "/usr/lib/postgresql/*/bin/postgres")
        self._data = folder / "data"
        self._password_file = folder / "password"

    @property
    def password(self) -> str:
        return self._password_file.read_text()

    def url(self, database: str = "postgres", driver: str = "postgresql+psycopg") -> str:
        return f"{driver}://trainyard:{self.password}@127.0.0.1:{self.port}/{database}"

    def user(self) -> str | None:
        if os.geteuid() != 0:
            return None
        known = {entry.pw_name for entry in pwd.getpwall()}
        return "postgres" if "postgres" in known else "nobody"

    def prepare(self) -> None:
        if self._data.exists():
            return
        user = self.user()
        self._password_file.touch(mode=0o600)
        self._password_file.write_text(secrets.token_urlsafe(16))
        if user:
            # The cache is below a home that this user may not enter.
            self._program = self._program.copied_to(self.folder / "program")
            for path in (self.folder, self._password_file):
                shutil.chown(path, user)
        initdb = self._program.beside("initdb")
        options = "-U trainyard -A scram-sha-256 -E UTF8 --locale=C.UTF-8 --no-sync"
        done = subprocess.run(
            [
                *unprivileged(user),
                str(initdb.path),
                "-D",
                str(self._data),
                *options.split(),
                f"--pwfile={self._password_file}",
            ],
            env=os.environ | initdb.environ(),
            cwd=self.folder,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise fetch.Unavailable(f"initdb ended with {done.returncode}:\n{done.stdout}{done.stderr}")

    def command(self) -> list[str]:
        safe = "on" if self._durable else "off"
        options = {
            "listen_addresses": "127.0.0.1",
            "port": self.port,
            "unix_socket_directories": "",
            "fsync": safe,
            "full_page_writes": safe,
            "max_connections": 100,
            "jit": "off",
        }
        return [
            str(self._program.path),
            "-D",
            str(self._data),
            *(part for key, value in options.items() for part in ("-c", f"{key}={value}")),
        ]

    def environ(self) -> Mapping[str, str]:
        return self._program.environ()

    def ready(self) -> bool:
        try:
            psycopg.connect(self.url(driver="postgresql"), connect_timeout=1).close()
            return True
        except psycopg.OperationalError:
            return False

    def _family(self) -> list[psutil.Process]:
        return self.children()  # each makes a session of its own, and ends with the first

    def execute(self, statement: str) -> None:
        """One statement of a superuser."""
        with psycopg.connect(self.url(driver="postgresql"), autocommit=True) as connection:
            connection.execute(statement.encode())

    def create(self, database: str) -> str:
        """A new, empty database; returns its URL."""
        self.execute(f'CREATE DATABASE "{database}"')
        return self.url(database)

    def drop(self, database: str) -> None:
        """Removes a database, whoever is connected."""
        self.execute(f'DROP DATABASE IF EXISTS "{database}" WITH (FORCE)')
